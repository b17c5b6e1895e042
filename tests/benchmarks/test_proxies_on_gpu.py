"""Proxies beside kernels, and the small problems of the paper's figures, with a GPU that invents its times."""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest

from benchmarks import proxies_on_gpu
from benchmarks.emission_pool import Kernel
from benchmarks.paper import __main__ as paper
from benchmarks.paper import fetch, load, regrouped, timing
from benchmarks.paper.tables import AXES
from benchmarks.proxies_on_gpu import build_pair, candidates_of, main, table
from benchmarks.reordering import tiling_of
from lospmm.errors import GpuFault
from lospmm.gpu.messages import Measure, Measurement, Ready
from lospmm.gpu.timing import FULL, Effort, Timing
from lospmm.problem.device import DEVICES
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem
from lospmm.space.reorder import natural_order
from lospmm.tuning.build import for_emitter
from lospmm_datasets.synthetic import paired_blocks, uniform

#: What each searched, and the microseconds of what it chose.
PAIR_OF_SEARCHES = (("full", 7, 2.0, 12.0), ("proxy", 30, 1.5, 9.0))


class Bench:
    """Says that a program takes as many microseconds as its cubin has kilobytes."""

    cache = "cold"
    fails = False

    def __init__(self, problem: Problem, command: Sequence[str] = ()) -> None:
        self.kernel_seconds, self.command = None, command
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
        return Ready("none", 1)

    def measure(self, cubin: bytes, _entry: str, _launch: Launch, effort: Effort = FULL) -> Measurement:
        return Measurement(None, None, "it fell over") if self.fails else self._timed(cubin, effort)

    def request(self, _command: str, task: Measure) -> Measurement:
        return self._timed(task.image, task.effort)

    def _timed(self, cubin: bytes, effort: Effort) -> Measurement:
        return Measurement(Timing(len(cubin) / 1e3, 0.0, effort.replays), 1e-7, None)


@pytest.fixture(autouse=True)
def _invented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mpl.rcParams, "backend", "agg")
    for module in (timing, proxies_on_gpu):
        monkeypatch.setattr(module, "Bench", Bench)
        monkeypatch.setattr(module, "detect_device", lambda: DEVICES["h200"])


def test_a_pair_is_the_kernel_and_its_proxy_with_and_without_equation_6() -> None:
    problem = for_emitter(Problem(uniform(96, 200, 0.8, seed=0), 512, DEVICES["h200"]), "sass")
    candidates = candidates_of(problem, 30)
    assert len({one.tile for one in candidates}) > 10
    pair = build_pair(problem, candidates[0], "sass")
    assert isinstance(pair.kernel, Kernel) and isinstance(pair.proxy, Kernel) and isinstance(pair.plain, Kernel)
    assert pair.proxy.launch.grid == pair.plain.launch.grid == pair.kernel.launch.grid
    assert pair.proxy.launch.shared_bytes > pair.plain.launch.shared_bytes == 0
    assert pair.proxy.instructions <= pair.kernel.instructions
    assert min(pair.kernel.seconds, pair.proxy.seconds) > 0


@pytest.mark.slow
def test_pairs_and_searches_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proxies_on_gpu, "PROBLEMS", ((32, 48, 512, 0.8),))
    monkeypatch.setattr(proxies_on_gpu, "BUDGETS", {"sass": 1.0, "ptx": 1.0})
    command = ["proxies_on_gpu", "--out", str(tmp_path), "--emitters", "sass", "ptx", "--candidates", "2"]
    monkeypatch.setattr(sys, "argv", command)
    files = [tmp_path / name for name in ("proxies_on_gpu.jsonl", "proxy_searches.jsonl")]
    main()
    found, told = [path.read_text() for path in files], capsys.readouterr().out
    main()
    assert ([path.read_text() for path in files], capsys.readouterr().out) == (found, told)
    pairs, searches = (paper.read_lines(path) for path in files)
    assert [one["emitter"] for one in pairs] == ["sass"] * 2 + ["ptx"] * 2
    assert all(one["kernel_micros"] > 0 and one["proxy_micros"] > 0 and one["failures"] == [] for one in pairs)
    assert [one["emitter"] for one in searches] == ["sass", "ptx"]
    assert all(min(one[way]["timed"], one[way]["micros"]) > 0 for one in searches for way in ("full", "proxy"))
    assert told.splitlines() == list(table(pairs, searches))


def test_the_table_of_pairs_and_searches() -> None:
    about = {"m": 10, "k": 10, "n": 64, "nnz": 20, "device": "h100", "emitter": "ptx"}
    axes = dict.fromkeys(AXES, 1)
    pairs = [
        {**about, **axes, "kernel_micros": kernel, "proxy_micros": proxy, "kernel_seconds": 4.0, "proxy_seconds": 1.0}
        for kernel, proxy in ((10.0, 2.0), (11.0, 1.0), (20.0, 3.0), (None, 0.5))
    ]
    ways = {
        way: {"timed": timed, "finals": 4, "seconds": seconds, "micros": micros}
        for way, timed, seconds, micros in PAIR_OF_SEARCHES
    }
    _, row, mean = table(pairs, [{**about, **ways}])
    assert " ".join(row.split()) == "10 10 64 80% ptx 3 0.50 0.33 10.0 0.0 4.00 1.00 7 30 4 2.0 1.5 12.00 9.00"
    assert mean.split() == ["mean", "ptx", *row.split()[5:]]
    assert " ".join(list(table(pairs[:1], []))[1].split()[5:]) == "1" + 13 * " nan"


def test_figures_are_measured_problem_by_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(load, "NNC", (64, 128))
    monkeypatch.setattr(regrouped, "SIMILARITIES", [0.0, 0.9])
    monkeypatch.setattr(regrouped, "LOAD_RATIOS", [1])
    monkeypatch.setattr(fetch, "KERNELS", ((8, 32), (8, 600), (8, 1200)))
    compared = {"no reordering": natural_order, "Mt-KaHyPar": lambda m, _: tiling_of(m, np.arange(m.m) // 36)}
    monkeypatch.setattr(regrouped, "methods", lambda: compared)
    monkeypatch.setattr(regrouped, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    paper.measure(tmp_path, None)
    found = paper.read_lines(tmp_path / paper.MEASURED)
    assert _of(found, "4", "nnc") == [64, 64, 128, 128] * len(load.NNZ)
    assert _of(found, "6", "method") == list(compared) * 2
    assert _of(found, "6", "max_rows") == [32, 36] * 2
    plain = [natural_order(paired_blocks(similarity, 1, seed=0), 36) for similarity in regrouped.SIMILARITIES]
    assert _of(found, "6", "total_nnc")[1::2] == [tiling.nnc.sum() for tiling in plain]
    assert _of(found, "9", "iterations") == [32, 600, 1200]
    monkeypatch.setattr(regrouped, "SIMILARITIES", [0.5])
    paper.measure(tmp_path, None, ["6"])
    again = paper.read_lines(tmp_path / paper.MEASURED)
    assert _of(again, "6", "similarity") == [0.5, 0.5]
    assert [one for one in again if one["figure"] != "6"] == [one for one in found if one["figure"] != "6"]


def _of(records: Sequence[dict[str, Any]], figure: str, name: str) -> list[Any]:
    return [one[name] for one in records if one["figure"] == figure]


def test_a_kernel_that_fails_ends_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "fails", True)
    with timing.Stand() as stand, pytest.raises(GpuFault, match="it fell over"):
        list(load.measure(stand))
