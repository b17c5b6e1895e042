"""What is written down of real tunings, with an emulated GPU and without."""

import json
from pathlib import Path
from typing import Any

import pytest

from lospmm.store import Store
from lospmm_server import observations
from lospmm_server.metrics import Metrics, QueueFigures
from tests.gpu.test_bench import gate_library
from tests.server.test_metrics import read
from tests.tuning.test_tune_measured import install, on_the_machine, tuned

__all__ = ["gate_library", "install", "on_the_machine"]  # fixtures


def counted(data: dict[str, Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The page after the event has been in a database, as JSON."""
    figures = Metrics()
    figures.observe("succeeded", json.loads(json.dumps(data)))
    return read(figures.render(QueueFigures(0, 0, 0.0)))


@pytest.mark.usefixtures("on_the_machine")
def test_a_tuning_with_a_gpu(tmp_path: Path) -> None:
    """And one of which a dense product has no time: that is left out."""
    made = tuned(Store(tmp_path / "store"))
    data = observations.succeeded(made, cache="miss", model="bert")
    measured, seconds = made.manifest["measured"], made.manifest["seconds"]
    assert data["speedup_over_dense"] == {
        "fp32": measured["cublas_fp32_micros"] / measured["micros"],
        "tf32": measured["cublas_tf32_micros"] / measured["micros"],
    }
    assert data["gpu_busy_seconds"] == sum(seconds[stage] for stage in ("measure_trials", "verify", "compare")) > 0
    log = [json.loads(line) for line in made.files["tuning.jsonl"].splitlines()]
    rank = min(log, key=lambda line: line["measured_micros"])["rank"]
    assert data["winner_place"] == ("first" if rank == 1 else "shortlist" if rank <= 4 else "neighbour")
    page = counted(data)
    assert page["lospmm_gpu_busy_seconds_total", ()] == data["gpu_busy_seconds"]
    assert page["lospmm_tuning_seconds_count", (("layer_size", "to 1k"), ("model", "bert"))] == 1
    assert page["lospmm_stage_seconds_sum", (("stage", "compare"),)] == seconds["compare"]
    without = {**made.manifest, "measured": {**measured, "cublas_tf32_micros": None}}
    data = observations.succeeded(type(made)(without, made.files), cache="miss")
    assert set(data["speedup_over_dense"]) == {"fp32"}


def test_a_tuning_without_a_gpu(tmp_path: Path) -> None:
    made = tuned(Store(tmp_path / "store"), measure="none", verify="none")
    data = observations.succeeded(made, cache="miss")
    assert (data["speedup_over_dense"], data["winner_place"], data["gpu_busy_seconds"]) == (None, None, 0.0)
    page = counted(data)
    assert page["lospmm_search_tile_sizes_total", (("step", "space"),)] == made.manifest["search"]["space"] > 0
    assert page["lospmm_stage_seconds_count", (("stage", "verify"),)] == 0


@pytest.mark.parametrize(
    ("micros", "place"), [((1.0, 2.0, 3.0), "first"), ((2.0, 1.0, 3.0), "shortlist"), ((None, 3.0, 2.0), "neighbour")]
)
def test_the_place_of_the_winner(micros: tuple[float | None, ...], place: str, tmp_path: Path) -> None:
    made = tuned(Store(tmp_path / "store"), measure="none", verify="none")
    lines = [json.dumps({"rank": rank, "measured_micros": time}) for rank, time in enumerate(micros, start=1)]
    manifest = {**made.manifest, "search": {**made.manifest["search"], "chosen_by": "measurement", "shortlisted": 2}}
    timed = type(made)(manifest, {**made.files, "tuning.jsonl": "\n".join(lines).encode()})
    assert observations.succeeded(timed, cache="miss")["winner_place"] == place
