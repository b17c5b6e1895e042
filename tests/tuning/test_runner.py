"""Candidates built and timed: in their order, each once, and nothing left running when it ends early."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lospmm.errors import GpuFault, ToolchainFault
from lospmm.families import FAMILIES, all_fours
from lospmm.families.candidate import Candidate, unrolled
from lospmm.gpu.bench import AGAIN
from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import BRIEF, Effort, Timing
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.toolchain import elf
from lospmm.toolchain.compile import Compiled
from lospmm.tuning import runner as runners
from lospmm.tuning.budget import LEAST_SEARCH_SECONDS, Budget
from lospmm.tuning.build import Build, build, prepare
from lospmm.tuning.builders import BuilderPool, PrefetchedBuilds
from lospmm.tuning.history import History, conditions_of
from lospmm.tuning.runner import GpuRunner
from tests.space.test_explore import random_matrix

PROBLEM = Problem(random_matrix(24, 30, 0.3, seed=1), 500, DEVICES["h200"])
CANDIDATES = [
    unrolled(UnrolledPlan(TileSize(rows, 32), Schedule(4), natural_order(PROBLEM.matrix, rows)))
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
        self.started_by: Callable[[], None] = lambda: None

    def start(self) -> None:
        """A GPU's worker starts before the first kernel."""
        if not self.measured:
            self.started_by()

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
def runner(bench: FakeBench, tmp_path: Path) -> Iterator[GpuRunner]:
    with made(bench, tmp_path) as runner:
        yield runner
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("build")]


def made(
    bench: FakeBench, tmp_path: Path, stages: Stages | None = None, problem: Problem = PROBLEM, **means: Any
) -> GpuRunner:
    fake: Any = bench
    store, stages = Store(tmp_path / "store"), stages or Stages()
    return GpuRunner(problem, "sass", fake, store=store, workers=2, stages=stages, **means)


def timed(runner: GpuRunner, candidates: list[Candidate] = CANDIDATES) -> list[Measurement]:
    runner.begin(candidates)
    trials = list(runner.trials(len(candidates)))
    assert [trial.candidate for trial in trials] == candidates[: len(trials)]
    return [trial.measurement for trial in trials]


def test_in_their_order_and_each_once(bench: FakeBench, runner: GpuRunner) -> None:
    """However many are asked for at a time; more than were begun there are not."""
    runner.begin(CANDIDATES[:2])
    runner.begin(CANDIDATES[2:])
    trials = [trial for count in (1, 3, 9) for trial in runner.trials(count)]
    grids = [candidate.plan.tiling.block_rows for candidate in CANDIDATES]
    assert [trial.candidate for trial in trials] == CANDIDATES
    assert [trial.micros for trial in trials] == grids
    assert [launch.grid[1] for _, _, launch in bench.measured] == grids
    assert bench.efforts == [BRIEF] * 5
    for cubin, entry, launch in bench.measured:
        assert isinstance(cubin, bytes)
        assert elf.kernel_usage(cubin, entry).stack_bytes == 0
        assert launch.block == 32


def test_the_order_stands_whatever_is_built_first(
    bench: FakeBench, runner: GpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:

    def slow_at_first(problem: Problem, candidate: Candidate, *args: Any, **options: Any) -> Build:
        time.sleep(0.2 if candidate is CANDIDATES[0] else 0)
        return build(problem, candidate, *args, **options)

    monkeypatch.setattr(runners, "build", slow_at_first)
    timed(runner)
    assert [launch.grid[1] for _, _, launch in bench.measured] == [c.plan.tiling.block_rows for c in CANDIDATES]


def test_progress_counts_over_all_rounds(bench: FakeBench, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    stages = Stages(lambda *step: seen.append(step))
    with made(bench, tmp_path, stages) as both:
        timed(both, CANDIDATES[:2])
        timed(both, CANDIDATES[2:])
    assert [step for step in seen if step[0] == "measure_trials"] == [
        ("measure_trials", done, 2 if done < 2 else 5) for done in range(5)
    ]
    seconds = stages.seconds()
    assert seconds["compile_trials"] > 0 and seconds["measure_trials"] > 0


def test_plans_of_families_are_built_by_builders(bench: FakeBench, tmp_path: Path) -> None:
    candidate = Candidate("csr", FAMILIES["csr"].plans(PROBLEM)[0], 1.0)
    with BuilderPool(1) as builders, made(bench, tmp_path, builders=builders) as runner:
        (measurement,) = timed(runner, [candidate])
    ((cubin, entry, _),) = bench.measured
    assert measurement.timing is not None and entry == "lospmm_rows"
    assert isinstance(cubin, Path) and not cubin.exists(), "of a builder, and gone with the trials"


def test_what_plans_have_in_common_is_done_together(
    bench: FakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By as many builders as may work at a time, before they build; and a file goes when its kernel was timed, but for
    one that is asked for again."""
    problem = replace(PROBLEM, n=64, dtype=DTYPES["float16"])
    shared = [Candidate("tensor_core", plan, 1.0) for plan in FAMILIES["tensor_core"].plans(problem)[:2]]
    asked: list[Any] = []
    with BuilderPool(2) as builders, made(bench, tmp_path, problem=problem, builders=builders) as runner:
        call = builders.call

        def counted(function: Callable[..., Any], *given: Any, cancel: Any) -> object:
            return asked.append(given[1]) if function is prepare else call(function, *given, cancel=cancel)

        monkeypatch.setattr(builders, "call", counted)
        monkeypatch.setattr(all_fours, "PART_COLUMNS", 0)
        runner.begin([*shared, shared[0]])
        left = [sum(Path(str(cubin)).exists() for cubin, _, _ in bench.measured) for _ in runner.trials(3)]
    assert asked == [shared] * 2 and left == [1, 1, 0]


def test_what_is_prefetched_is_not_built_and_the_fastest_are_kept(
    bench: FakeBench, runner: GpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To be timed again; there was room for one."""
    built: list[Candidate] = []

    def counted(problem: Problem, candidate: Candidate, *args: Any, **options: Any) -> Build:
        built.append(candidate)
        return build(problem, candidate, *args, **options)

    monkeypatch.setattr(runners, "build", counted)
    first, second, fastest = CANDIDATES[:3]
    ready = Compiled(b"prefetched", "k", Launch((1, 9, 1), 32))
    with PrefetchedBuilds(kept=1) as prefetched:
        runner.prefetched = prefetched
        prefetched.begin(first, lambda *_: ready)
        assert [one.timing is not None for one in timed(runner, [first, second, fastest])] == [True] * 3
        assert bench.measured[0][:2] == (b"prefetched", "k")
        assert set(built) == {second, fastest}
        assert len(list(runner.again([fastest, second]))) == 2
        assert built.count(fastest) == 1 and built.count(second) == 2
    assert bench.efforts[3:] == [AGAIN] * 2


def test_a_build_that_fails_is_a_kernel_that_failed(
    bench: FakeBench, runner: GpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fails(problem: Problem, candidate: Candidate, *args: Any, **options: Any) -> Build:
        if candidate is CANDIDATES[2]:
            raise ToolchainFault("ptxas: exit status 255")
        return build(problem, candidate, *args, **options)

    monkeypatch.setattr(runners, "build", fails)
    found = timed(runner)
    assert [measurement.failure for measurement in found] == [None, None, "ptxas: exit status 255", None, None]
    assert len(bench.measured) == len(CANDIDATES) - 1


def test_without_a_gpu_no_more_is_built(bench: FakeBench, runner: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **_options: object) -> Measurement:
        raise GpuFault("the process that runs kernels cannot be started")

    monkeypatch.setattr(bench, "measure", lost)
    with pytest.raises(GpuFault):
        timed(runner)


def test_what_is_dropped_is_not_built(runner: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has begun is told to stop, and what has not is not begun; others may begin behind."""
    stopped: list[bool] = []
    begun: list[Candidate] = []

    def waits(problem: Problem, candidate: Candidate, *args: Any, cancel: threading.Event, **options: Any) -> Build:
        begun.append(candidate)
        if candidate is CANDIDATES[0]:
            return build(problem, candidate, *args, cancel=cancel, **options)
        stopped.append(cancel.wait(20))
        raise CancelledError

    monkeypatch.setattr(runners, "build", waits)
    runner.begin(CANDIDATES)
    assert next(runner.trials(1)).has_run
    runner.drop()
    assert stopped and all(stopped)
    assert len(begun) < len(CANDIDATES)
    assert list(runner.trials(1)) == []
    assert timed(runner, CANDIDATES[:1])[0].timing is not None


def test_a_cancelled_job_times_no_more(bench: FakeBench, tmp_path: Path) -> None:
    cancel = threading.Event()
    with made(bench, tmp_path, Stages(cancel=cancel)) as runner:
        runner.begin(CANDIDATES)
        next(runner.trials(1))
        cancel.set()
        with pytest.raises(CancelledError):
            next(runner.trials(1))
    assert len(bench.measured) == 1


def test_a_job_is_cancelled_while_a_kernel_is_built(
    bench: FakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(*_: object, cancel: threading.Event, **_options: object) -> Build:
        assert cancel.wait(20), "the build is told to stop"
        raise CancelledError

    monkeypatch.setattr(runners, "build", waits)
    cancel = threading.Event()
    threading.Timer(0.2, cancel.set).start()
    with made(bench, tmp_path, Stages(cancel=cancel)) as runner, pytest.raises(CancelledError):
        timed(runner)
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
    time = Time()
    budget = Budget(60.0, clock=time)
    monkeypatch.setattr("lospmm.tuning.budget.LEAST_SEARCH_SECONDS", 0.0)

    def slow(problem: Problem, candidate: Candidate, *args: Any, cancel: threading.Event, **options: Any) -> Build:
        if candidate is CANDIDATES[0]:
            time.seconds += 70  # it is waited for all the same: nothing has run yet
            return build(problem, candidate, *args, cancel=cancel, **options)
        assert cancel.wait(20), "the build is told to stop"
        raise CancelledError

    monkeypatch.setattr(runners, "build", slow)
    with made(bench, tmp_path, budget=budget) as runner:
        assert not runner.is_over
        (found,) = timed(runner)
        assert found.timing is not None and runner.is_over
        assert list(runner.trials(1)) == [] == list(runner.again(CANDIDATES[1:])), "nor is another waited for"


@pytest.mark.parametrize("seconds", [1.0, 20.0])
def test_the_start_of_the_gpu_is_no_measurement(bench: FakeBench, tmp_path: Path, seconds: float) -> None:
    """Kernels are timed if it uses up the budget, and a longer one reserves no more such starts for the end."""
    time = Time()
    bench.started_by = lambda: setattr(time, "seconds", 103.0)
    with made(bench, tmp_path, budget=Budget(seconds, measurements=4, clock=time)) as runner:
        assert len(timed(runner)) == len(CANDIDATES) and not runner.is_over
        time.seconds += max(seconds - 3.1, LEAST_SEARCH_SECONDS)
        assert runner.is_over is (seconds < 3.0)


def test_a_kernel_has_no_more_time_than_the_budget(bench: FakeBench, tmp_path: Path) -> None:
    time = Time()
    with made(bench, tmp_path, budget=Budget(12.0, clock=time)) as runner:
        runner.begin(CANDIDATES[:3])
        for seconds in (5, 6.9, 0):
            next(runner.trials(1))
            time.seconds += seconds
    assert bench.limits == [None, 7.0, 1.0]


def test_what_is_known_is_neither_built_nor_timed(bench: FakeBench, tmp_path: Path) -> None:
    conditions = conditions_of(PROBLEM, "sass", gpu="0" * 32, driver="580.1", compiler="ptxas 13.0.88")

    def run(count: int = len(CANDIDATES), *, is_again: bool = False) -> list[Measurement]:
        history = History(Store(tmp_path / "store"), conditions)
        with made(bench, tmp_path, history_of=lambda _: history) as runner:
            if is_again:
                return list(runner.again(CANDIDATES))
            runner.begin(CANDIDATES)
            return [trial.measurement for trial in runner.trials(count)]

    first = run(2)  # as if it were killed then
    assert len(bench.measured) == 2
    whole = run()
    assert whole[:2] == first
    assert len(bench.measured) == len(CANDIDATES)
    assert run() == whole
    assert len(bench.measured) == len(CANDIDATES)
    longer = run(is_again=True)  # which says more
    assert bench.efforts[len(CANDIDATES) :] == [AGAIN] * len(CANDIDATES)
    measured = len(bench.measured)
    assert run() == whole and run(is_again=True) == longer and len(bench.measured) == measured
