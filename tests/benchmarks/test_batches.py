"""benchmarks/batches.py without a GPU."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from benchmarks import batches
from benchmarks.inference import pruned
from lospmm.model.report import LayerError, LayerReport
from lospmm.problem.launch import Launch


def test_sums_are_of_what_was_chosen_and_of_cublas() -> None:
    launch = Launch(grid=(1, 1, 1), block=32, shared_bytes=0)
    kernels = [
        LayerReport(name="timed", folder="", launch=launch, digest="1", micros=3.0, dense_micros=5.0),
        LayerReport(name="left", folder="", launch=launch, digest="2", micros=4.0, dense_micros=2.0, family="dense"),
        LayerReport(
            name="equal", folder="", launch=launch, digest="2", estimated_micros=1.0, dense_forecast_micros=7.0
        ),
    ]
    failed = LayerReport(name="failed", folder="", error=LayerError("NothingFits", "no tile size fits", 3))
    found = batches.line([*kernels, failed, LayerReport(name="embedding", folder="", skipped="no kernel")])
    assert (found.pop("chosen_micros"), found.pop("dense_micros")) == (3.0 + 2.0 + 1.0, 5.0 + 2.0 + 7.0)
    assert found == {"layers": 5, "tuned": 2, "dense": 1, "skipped": 1, "failed": 1, "kernels": 2, "timed": 2}


@pytest.mark.slow
def test_a_network_is_tuned_by_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (pruned, batches):
        monkeypatch.setattr(module, "NETWORKS", {"toy": pruned.CASES[3].toy})
    batches.main(["--batch", "2", "--device", "h200", "--measure", "none", "--out", str(tmp_path)])
    line = json.loads((tmp_path / "batches.jsonl").read_text())
    counts = {"layers": 11, "tuned": 8, "dense": 0, "skipped": 3, "failed": 0, "kernels": 6, "timed": 0}
    assert {name: line[name] for name in counts} == counts
    assert (line["network"], line["machine"]["device"]) == ("toy", "h200")
    assert line["dense_micros"] > line["chosen_micros"] > 0
