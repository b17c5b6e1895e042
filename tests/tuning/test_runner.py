"""Candidates built and timed: in their order, each once, and nothing left running when it ends early."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lospmm.errors import GpuFault, ToolchainFault
from lospmm.families import FAMILIES, Candidate, all_fours
from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import BRIEF, FULL, Effort, Timing
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Launch, Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.toolchain import elf
from lospmm.tuning import runner as trials
from lospmm.tuning.budget import Budget
from lospmm.tuning.build import Build
from lospmm.tuning.builders import BuilderPool
from lospmm.tuning.history import History, conditions_of
from lospmm.tuning.runner import GpuRunner, RunnerSetup
from tests.space.test_explore import random_matrix

PROBLEM = Problem(random_matrix(24, 30, 0.3, seed=1), 500, DEVICES["h200"])
CANDIDATES = [
    UnrolledPlan(TileSize(rows, 32), Schedule(4, lockstep=128), natural_order(PROBLEM.matrix, rows))
    for rows in (8, 3, 24, 1, 12)
]


class FakeBench:
    """Times what it is given by its launch; every kernel is written down."""

    def __init__(self) -> None:
        self.measured: list[tuple[bytes | Path, str, Launch]] = []
        self.efforts: list[Effort] = []
        self.kernel_seconds: float | None = None
        self.limits: list[float | None] = []
        self.inside = 0

    def begin(self, *_: Any, **__: Any) -> None:
        """A GPU would begin with the next kernel."""

    def measure(self, cubin: bytes | Path, entry: str, launch: Launch, *, effort: Effort) -> Measurement:
        self.inside += 1
        assert self.inside == 1, "one kernel at a time"
        self.measured.append((cubin, entry, launch))
        self.efforts.append(effort)
        self.limits.append(self.kernel_seconds)
        self.inside -= 1
        return Measurement(Timing(float(launch.grid[1]), 0.0, 15), 1e-7, None)


@pytest.fixture
def bench() -> FakeBench:
    return FakeBench()


@pytest.fixture
def build_and_time(bench: FakeBench, tmp_path: Path) -> Iterator[GpuRunner]:
    yield made(bench, tmp_path, Stages())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("build")]


def made(bench: FakeBench, tmp_path: Path, stages: Stages, means: RunnerSetup | None = None) -> GpuRunner:
    fake: Any = bench
    store = Store(tmp_path / "store")
    return GpuRunner(PROBLEM, "sass", fake, store=store, workers=2, stages=stages, means=means)


def test_in_their_order_and_each_once(bench: FakeBench, build_and_time: GpuRunner) -> None:
    measurements = list(build_and_time(CANDIDATES))
    grids = [candidate.tiling.block_rows for candidate in CANDIDATES]
    assert [m.timing.micros for m in measurements if m.timing] == grids
    assert [launch.grid[1] for _, _, launch in bench.measured] == grids
    for cubin, entry, launch in bench.measured:
        assert elf.kernel_usage(cubin, entry).stack_bytes == 0
        assert launch.block == 32


def test_the_order_stands_whatever_is_built_first(
    bench: FakeBench, build_and_time: GpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trials.build

    def slow_at_first(problem: Problem, candidate: UnrolledPlan, *args: Any, **options: Any) -> Build:
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


def test_plans_of_families_are_built_by_the_crew(bench: FakeBench, tmp_path: Path) -> None:
    entrant = Candidate("csr", FAMILIES["csr"].plans(PROBLEM)[0], 1.0)
    with BuilderPool(1) as crew:
        (measurement,) = made(bench, tmp_path, Stages(), RunnerSetup(crew))([entrant])
    ((cubin, entry, _),) = bench.measured
    assert measurement.timing is not None and entry == "lospmm_csr"
    assert isinstance(cubin, Path) and not cubin.exists(), "of the crew, and gone with the trials"


def test_what_plans_have_in_common_is_done_together(
    bench: FakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By as many builders as may work at a time, before they build; and a file goes when its kernel was timed, but for
    one that is asked for again."""
    problem = replace(PROBLEM, n=64, dtype=DTYPES["float16"])
    shared = [Candidate("tensor_core", plan, 1.0) for plan in FAMILIES["tensor_core"].plans(problem)[:2]]
    asked: list[Any] = []
    fake: Any = bench
    with BuilderPool(2) as crew:
        monkeypatch.setattr(crew, "prepare", lambda *given: asked.append(given[1]))
        monkeypatch.setattr(all_fours, "PART_COLUMNS", 0)
        store, means = Store(tmp_path / "store"), RunnerSetup(crew)
        many = GpuRunner(problem, "template", fake, store=store, workers=2, stages=Stages(), means=means)
        running = many([*shared, shared[0]])
        left = [sum(cubin.exists() for cubin, _, _ in bench.measured) for _ in running]
    assert asked == [shared] * 2 and left == [1, 1, 0]


def test_a_build_that_fails_is_a_kernel_that_failed(
    bench: FakeBench, build_and_time: GpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trials.build

    def fails(problem: Problem, candidate: UnrolledPlan, *args: Any, **options: Any) -> Build:
        if candidate is CANDIDATES[2]:
            raise ToolchainFault("ptxas: exit status 255")
        return real(problem, candidate, *args, **options)

    monkeypatch.setattr(trials, "build", fails)
    found = list(build_and_time(CANDIDATES))
    assert [measurement.failure for measurement in found].count("ptxas: exit status 255") == 1
    assert found[2].failure == "ptxas: exit status 255"
    assert len(bench.measured) == len(CANDIDATES) - 1


def test_without_a_gpu_no_more_is_built(
    bench: FakeBench, build_and_time: GpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object, **_options: object) -> Measurement:
        raise GpuFault("the process that runs kernels cannot be started")

    monkeypatch.setattr(bench, "measure", lost)
    with pytest.raises(GpuFault):
        list(build_and_time(CANDIDATES))


def test_whoever_stops_listening_stops_the_builds(build_and_time: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a budget does: what has begun is told to stop, and what has not is not begun."""
    stopped: list[bool] = []
    begun: list[UnrolledPlan] = []
    real = trials.build

    def waits(problem: Problem, candidate: UnrolledPlan, *args: Any, cancel: threading.Event, **options: Any) -> Build:
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


class Time:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_a_budget_cuts_a_build_short_once_something_ran(
    bench: FakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time, real = Time(), trials.build
    budget = Budget(60.0, clock=time)

    def slow(problem: Problem, candidate: UnrolledPlan, *args: Any, cancel: threading.Event, **options: Any) -> Build:
        if candidate is CANDIDATES[0]:
            time.seconds += 70  # it is waited for all the same: nothing has run yet
            return real(problem, candidate, *args, cancel=cancel, **options)
        assert cancel.wait(20), "the build is told to stop"
        raise CancelledError

    monkeypatch.setattr(trials, "build", slow)
    found = list(made(bench, tmp_path, Stages(), RunnerSetup(budget=budget))(CANDIDATES))
    assert len(found) == 1 and found[0].timing is not None


def test_a_kernel_has_no_more_time_than_the_budget(bench: FakeBench, tmp_path: Path) -> None:
    time = Time()
    running = made(bench, tmp_path, Stages(), RunnerSetup(budget=Budget(12.0, clock=time)))(CANDIDATES)
    next(running)
    time.seconds += 5
    next(running)
    time.seconds += 6.9
    next(running)
    running.close()
    assert bench.limits == [None, 7.0, 1.0]


def test_what_is_known_is_neither_built_nor_timed(bench: FakeBench, tmp_path: Path) -> None:
    conditions = conditions_of(PROBLEM, "sass", gpu="0" * 32, driver="580.1", compiler="ptxas 13.0.88")

    def run(stop: int = len(CANDIDATES), effort: Effort = BRIEF) -> list[Measurement]:
        timings = History(Store(tmp_path / "store"), conditions)
        running = made(bench, tmp_path, Stages(), RunnerSetup(timings=timings, effort=effort))(CANDIDATES)
        found = [next(running) for _ in range(stop)]
        running.close()
        return found

    first = run(stop=2)  # as if it were killed then
    assert len(bench.measured) == 2
    whole = run()
    assert whole[:2] == first
    assert len(bench.measured) == len(CANDIDATES)
    assert run() == whole
    assert len(bench.measured) == len(CANDIDATES)
    run(effort=FULL)  # which says more
    assert bench.efforts[len(CANDIDATES) :] == [FULL] * len(CANDIDATES)
    again = len(bench.measured)
    assert run() == whole and len(bench.measured) == again
