"""Proxies beside kernels, and the small problems of the paper's figures, with a GPU that invents its times."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

from benchmarks import proxies_on_gpu
from benchmarks.emission_pool import Kernel
from benchmarks.paper import __main__ as paper
from benchmarks.paper import fetch, load, regrouped, timing
from benchmarks.proxies_on_gpu import build_pair, candidates_of, main, summary
from lospmm.errors import GpuFault
from lospmm.gpu.messages import Measure, Measurement, Ready
from lospmm.gpu.timing import Timing
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Launch, Problem
from lospmm.tuning.build import for_emitter
from lospmm_datasets.synthetic import uniform


class Bench:
    """Says that a program takes as many microseconds as its cubin has kilobytes."""

    cache = "cold"
    fails = False

    def __init__(self, problem: Problem) -> None:
        self.turn_to(problem)

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        pass

    def turn_to(self, problem: Problem) -> None:
        self.problem = problem

    def start(self) -> Ready:
        return Ready("none", "none", (13, 0), 1, 1)

    def measure(self, cubin: bytes, _entry: str, _launch: Launch) -> Measurement:
        return Measurement(None, None, "it fell over") if self.fails else self._timed(cubin)

    def request(self, _command: str, task: Measure) -> Measurement:
        return self._timed(task.image)

    def _timed(self, cubin: bytes) -> Measurement:
        return Measurement(Timing(len(cubin) / 1e3, 0.0, 5), 1e-7, None)


@pytest.fixture(autouse=True)
def _invented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mpl.rcParams, "backend", "agg")
    for module in (timing, proxies_on_gpu):
        monkeypatch.setattr(module, "Bench", Bench)
        monkeypatch.setattr(module, "detect_device", lambda: DEVICES["h200"])


def test_a_pair_is_the_kernel_and_its_proxy_with_and_without_equation_6() -> None:
    problem = for_emitter(Problem(uniform(96, 200, 0.8, seed=0), 512, DEVICES["h200"]), "sass")
    candidates = candidates_of(problem, "sass")
    assert len({one.tile for one in candidates}) > 10
    pair = build_pair(problem, candidates[0], "sass")
    assert isinstance(pair.kernel, Kernel) and isinstance(pair.proxy, Kernel) and isinstance(pair.plain, Kernel)
    assert pair.proxy.launch.grid == pair.plain.launch.grid == pair.kernel.launch.grid
    assert pair.proxy.launch.shared_bytes > pair.plain.launch.shared_bytes == 0
    assert pair.proxy.instructions <= pair.kernel.instructions
    assert min(pair.kernel.seconds, pair.proxy.seconds) > 0


@pytest.mark.slow
def test_every_language_is_built_and_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proxies_on_gpu, "PROBLEMS", ((32, 48, 512, 0.8),))
    monkeypatch.setattr(proxies_on_gpu, "SAMPLES", {"sass": 3, "ptx": 1, "cuda": 0})
    monkeypatch.setattr(sys, "argv", ["proxies_on_gpu", "--out", str(tmp_path), "--emitters", "sass", "ptx"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    records = paper.read_lines(tmp_path / "proxies_on_gpu.jsonl")
    assert [one["emitter"] for one in records] == ["sass"] * 3 + ["ptx"]
    assert all(one["kernel_micros"] > 0 and one["proxy_micros"] > 0 and one["failures"] == [] for one in records)
    assert summary(records[:3]) in capsys.readouterr().out


def test_figures_are_measured_problem_by_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(load, "NNC", (64, 128))
    monkeypatch.setattr(regrouped, "SIMILARITIES", [0.0, 0.9])
    monkeypatch.setattr(regrouped, "LOAD_RATIOS", [1])
    monkeypatch.setattr(fetch, "KERNELS", ((8, 32), (8, 600), (8, 1200)))
    paper.measure(tmp_path, None)
    found = [json.loads(line) for line in (tmp_path / paper.MEASURED).read_text().splitlines()]
    assert _of(found, "4", "nnc") == [64, 64, 128, 128] * len(load.NNZ)
    assert _of(found, "6", "method") == list(regrouped.METHODS) * 2
    assert _of(found, "9", "iterations") == [32, 600, 1200]


def _of(records: Sequence[dict[str, Any]], figure: str, name: str) -> list[Any]:
    return [one[name] for one in records if one["figure"] == figure]


def test_a_kernel_that_fails_ends_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "fails", True)
    with timing.Stand() as stand, pytest.raises(GpuFault, match="it fell over"):
        list(load.measure(stand))
