"""Candidates built and timed: in their order, each once, and nothing left running when it ends early."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from lospmm import trials
from lospmm.build import Build
from lospmm.device import DEVICES
from lospmm.errors import GpuFault, ToolchainFault
from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import Timing
from lospmm.model import Candidate, Launch, Problem, Schedule, TileSize
from lospmm.reorder import natural_order
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.toolchain import elf
from lospmm.trials import BuildAndTime
from tests.core.test_space import random_matrix

PROBLEM = Problem(random_matrix(24, 30, 0.3, seed=1), 500, DEVICES["h200"])
CANDIDATES = [
    Candidate(TileSize(rows, 32), Schedule(4, lockstep=128), natural_order(PROBLEM.matrix, rows))
    for rows in (8, 3, 24, 1, 12)
]


class FakeBench:
    """Times what it is given by its launch; every kernel is written down."""

    def __init__(self) -> None:
        self.measured: list[tuple[bytes, str, Launch]] = []
        self.inside = 0

    def measure(self, cubin: bytes, entry: str, launch: Launch) -> Measurement:
        self.inside += 1
        assert self.inside == 1, "one kernel at a time"
        self.measured.append((cubin, entry, launch))
        self.inside -= 1
        return Measurement(Timing(float(launch.grid[1]), 0.0, 15), 1e-7, None)


@pytest.fixture
def bench() -> FakeBench:
    return FakeBench()


@pytest.fixture
def build_and_time(bench: FakeBench, tmp_path: Path) -> Iterator[BuildAndTime]:
    yield made(bench, tmp_path, Stages())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("build")]


def made(bench: FakeBench, tmp_path: Path, stages: Stages) -> BuildAndTime:
    fake: Any = bench
    return BuildAndTime(PROBLEM, "sass", fake, store=Store(tmp_path / "store"), workers=2, stages=stages)


def test_in_their_order_and_each_once(bench: FakeBench, build_and_time: BuildAndTime) -> None:
    measurements = list(build_and_time(CANDIDATES))
    grids = [candidate.tiling.block_rows for candidate in CANDIDATES]
    assert [m.timing.micros for m in measurements if m.timing] == grids
    assert [launch.grid[1] for _, _, launch in bench.measured] == grids
    for cubin, entry, launch in bench.measured:
        assert elf.kernel_usage(cubin, entry).stack_bytes == 0
        assert launch.block == 32


def test_the_order_stands_whatever_is_built_first(
    bench: FakeBench, build_and_time: BuildAndTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trials.build

    def slow_at_first(problem: Problem, candidate: Candidate, *args: Any, **options: Any) -> Build:
        time.sleep(0.2 if candidate is CANDIDATES[0] else 0)
        return real(problem, candidate, *args, **options)

    monkeypatch.setattr(trials, "build", slow_at_first)
    list(build_and_time(CANDIDATES))
    assert [launch.grid[1] for _, _, launch in bench.measured] == [c.tiling.block_rows for c in CANDIDATES]


def test_progress_counts_over_all_rounds(bench: FakeBench, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    stages = Stages(lambda *step: seen.append(step))
    both = made(bench, tmp_path, stages)
    list(both(CANDIDATES[:2]))
    list(both(CANDIDATES[2:]))
    assert [step for step in seen if step[0] == "measure_trials"] == [
        ("measure_trials", done, 2 if done < 2 else 5) for done in range(5)
    ]
    seconds = stages.seconds()
    assert seconds["compile_trials"] > 0 and seconds["measure_trials"] > 0


def test_a_build_that_fails_is_a_kernel_that_failed(
    bench: FakeBench, build_and_time: BuildAndTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trials.build

    def fails(problem: Problem, candidate: Candidate, *args: Any, **options: Any) -> Build:
        if candidate is CANDIDATES[2]:
            raise ToolchainFault("ptxas: exit status 255")
        return real(problem, candidate, *args, **options)

    monkeypatch.setattr(trials, "build", fails)
    found = list(build_and_time(CANDIDATES))
    assert [measurement.failure for measurement in found].count("ptxas: exit status 255") == 1
    assert found[2].failure == "ptxas: exit status 255"
    assert len(bench.measured) == len(CANDIDATES) - 1


def test_without_a_gpu_no_more_is_built(
    bench: FakeBench, build_and_time: BuildAndTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> Measurement:
        raise GpuFault("the process that runs kernels cannot be started")

    monkeypatch.setattr(bench, "measure", lost)
    with pytest.raises(GpuFault):
        list(build_and_time(CANDIDATES))


def test_whoever_stops_listening_stops_the_builds(
    build_and_time: BuildAndTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a budget does: what has begun is told to stop, and what has not is not begun."""
    stopped: list[bool] = []
    begun: list[Candidate] = []
    real = trials.build

    def waits(problem: Problem, candidate: Candidate, *args: Any, cancel: threading.Event, **options: Any) -> Build:
        begun.append(candidate)
        if candidate is CANDIDATES[0]:
            return real(problem, candidate, *args, cancel=cancel, **options)
        stopped.append(cancel.wait(20))
        raise CancelledError

    monkeypatch.setattr(trials, "build", waits)
    measurements = iter(build_and_time(CANDIDATES))
    assert next(measurements).timing is not None
    getattr(measurements, "close")()  # noqa: B009 - a generator, which its type does not say
    assert stopped and all(stopped)
    assert len(begun) < len(CANDIDATES)


def test_a_cancelled_job_times_no_more(bench: FakeBench, tmp_path: Path) -> None:
    cancel = threading.Event()
    running = iter(made(bench, tmp_path, Stages(cancel=cancel))(CANDIDATES))
    next(running)
    cancel.set()
    with pytest.raises(CancelledError):
        next(running)
    assert len(bench.measured) == 1


def test_a_job_is_cancelled_while_a_kernel_is_built(
    bench: FakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(*_: object, cancel: threading.Event, **_options: object) -> Build:
        assert cancel.wait(20), "the build is told to stop"
        raise CancelledError

    monkeypatch.setattr(trials, "build", waits)
    cancel = threading.Event()
    threading.Timer(0.2, cancel.set).start()
    with pytest.raises(CancelledError):
        list(made(bench, tmp_path, Stages(cancel=cancel))(CANDIDATES))
    assert not bench.measured
