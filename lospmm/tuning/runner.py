"""Candidates built and timed: kernels are built at the same time, and each is timed as soon as its turn comes.

One kernel at a time runs on the GPU; a lock keeps other tunings of this machine from timing theirs meanwhile.
"""

import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lospmm.errors import BadRequest, ToolchainFault
from lospmm.families import Candidate, shared_of
from lospmm.gpu.bench import Bench
from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import FULL, Effort
from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.toolchain.compile import Built, OnDisk
from lospmm.tuning.budget import Budget
from lospmm.tuning.build import build
from lospmm.tuning.builders import BuilderPool, BuildPlace, PrefetchedBuilds
from lospmm.tuning.history import History

#: How often a wait for a kernel looks whether it was cancelled, or whether time is up.
POLL_SECONDS = 0.1

#: The least time limit of a kernel on the GPU, however little is left of a budget.
LEAST_KERNEL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RunnerSetup:
    """What trials may have beside a bench: who builds for them, what is known already, how well to measure, and until
    when."""

    crew: BuilderPool | None = None  # None: threads of this process
    timings: History | None = None
    effort: Effort = FULL
    budget: Budget = field(default_factory=Budget)
    stock: PrefetchedBuilds | None = None  # kernels that are built already


class GpuRunner:
    """Trials of one problem (``trial.Trials``). Kernels that are built are not kept: a winner is built again.

    What is timed are candidates, built by ``emitter``, or entrants of other families.
    """

    def __init__(
        self,
        problem: Problem,
        emitter: str,
        bench: Bench,
        *,
        store: Store,
        workers: int,
        stages: Stages,
        means: RunnerSetup | None = None,
    ) -> None:
        self.problem, self.emitter, self.bench = problem, emitter, bench
        self.store, self.workers, self.stages = store, workers, stages
        self.means = means or RunnerSetup()
        self.asked = 0
        self.timed = 0  # of those that were asked for; or failed, or known
        self.measured = 0  # of these, on the GPU
        self._ran = False

    def __call__(self, candidates: Sequence[UnrolledPlan | Candidate]) -> "RunningTrials":
        """The kernels are built from now on, and timed one after the other as they are asked for.

        A kernel that cannot be built has failed, as one that cannot be run. Once one ran they end with the budget.
        """
        return RunningTrials(self, candidates)

    def measurements(self, begun: "RunningTrials") -> Generator[Measurement]:
        """Raises GpuFault without a GPU, and CancelledError."""
        try:
            for at, (candidate, found, future) in enumerate(
                zip(begun.candidates, begun.known, begun.builds, strict=True), start=1
            ):
                self.stages.progress("measure_trials", self.timed, self.asked)
                measurement = found if future is None else self._measure(candidate, future)
                if measurement is None:
                    return
                self._ran = self._ran or measurement.timing is not None
                self.timed += 1
                begun.drop(at)
                self.begin_timing(begun, at)
                yield measurement
        finally:
            begun.end()

    def known(self, candidate: UnrolledPlan | Candidate) -> Measurement | None:
        timings = self.means.timings
        return None if timings is None else timings.take(candidate, self.means.effort)

    def begin(
        self, candidates: Sequence[Any], pool: ThreadPoolExecutor, place: "BuildPlace"
    ) -> Sequence[Future[Built]]:
        """What is timed of each, being built by ``pool``: once, however often it is asked for."""
        crew, stock = self.means.crew, self.means.stock
        if crew is not None and (shared := self._sharing(candidates)):
            for _ in range(self.workers):  # what fails does so in builds too
                pool.submit(crew.prepare, self.problem, shared, self.store, place.stop)
        builds: dict[Any, Future[Built]] = {}
        for candidate in dict.fromkeys(candidates):
            held = None if stock is None else stock.take(candidate)
            builds[candidate] = pool.submit(self.build, candidate, place) if held is None else held
        return [builds[candidate] for candidate in candidates]

    def _sharing(self, candidates: Sequence[Any]) -> list[Candidate]:
        plans = [one for one in dict.fromkeys(candidates) if isinstance(one, Candidate)]
        return [one for one in plans if shared_of(self.problem, one) is not None]

    def build(self, candidate: UnrolledPlan | Candidate, place: "BuildPlace") -> Built:
        crew, stop = self.means.crew, place.stop
        if crew is not None:
            return crew.build(self.problem, candidate, self.emitter, self.store, stop, folder=place.folder)
        return build(self.problem, candidate, self.emitter, store=self.store, workers=1, cancel=stop).compiled

    def begin_timing(self, begun: "RunningTrials", at: int) -> None:
        """Have the GPU go on with the candidate at this place while whoever asked looks at the one before, if it is
        built."""
        future = begun.builds[at] if at < len(begun.builds) else None
        if future is None or not future.done() or future.exception() is not None:
            return
        built = future.result()
        if isinstance(built, OnDisk) and not self.means.budget.is_over:
            self.bench.begin(built.cubin, built.entry, built.launch, effort=self.means.effort)

    def time(self, _candidate: Any, built: Built) -> Measurement:
        return self.bench.measure(built.cubin, built.entry, built.launch, effort=self.means.effort)

    def _measure(self, candidate: UnrolledPlan | Candidate, future: Future[Built]) -> Measurement | None:
        """None where time is up before the kernel is built."""
        means = self.means
        with self.stages.part("compile_trials"):
            if not is_built(future, self.stages, lambda: self._ran and means.budget.is_over):
                return None
            try:
                built = future.result()
            except (ToolchainFault, BadRequest) as error:
                return Measurement(None, None, str(error))
        with self.stages.part("measure_trials"):
            if self._ran:
                self.bench.kernel_seconds = max(means.budget.left, LEAST_KERNEL_SECONDS)
            with means.budget.measuring():
                measurement = self.time(candidate, built)
            self.measured += 1
            if means.timings is not None:
                means.timings.add(candidate, means.effort, measurement)
            if means.stock is not None and measurement.timing is not None:
                means.stock.keep(candidate, built, measurement.timing.micros)
        return measurement


def is_built(future: Future[Built], stages: Stages, is_over: Callable[[], bool] = lambda: False) -> bool:
    """Wait until there is a kernel, or why there is none; False where time is up before. Raises CancelledError."""
    while not wait([future], POLL_SECONDS).done:
        if stages.cancel is not None and stages.cancel.is_set():
            raise CancelledError
        if is_over():
            return False
    return True


class RunningTrials(Iterator[Measurement]):
    """Measurements of some candidates, whose kernels are built until it is closed."""

    def __init__(self, trials: GpuRunner, candidates: Sequence[UnrolledPlan | Candidate]) -> None:
        self.candidates = candidates
        self._trials, self._is_begun = trials, False
        folder = Path(tempfile.mkdtemp(prefix="lospmm-kernels-"))
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)  # should nobody end it
        self._place = BuildPlace(folder, threading.Event())
        self._pool = ThreadPoolExecutor(trials.workers, thread_name_prefix="build")
        self.known = [trials.known(candidate) for candidate in candidates]
        unknown = [candidate for candidate, found in zip(candidates, self.known, strict=True) if found is None]
        begun = iter(trials.begin(unknown, self._pool, self._place))
        self.builds = [next(begun) if found is None else None for found in self.known]
        trials.asked += len(candidates)
        self._measurements = trials.measurements(self)

    def __next__(self) -> Measurement:
        self._is_begun = True
        return next(self._measurements)

    def start(self) -> None:
        """Have the GPU begin with the first, which is asked for next."""
        if not self._is_begun:
            self._trials.begin_timing(self, 0)

    def drop(self, count: int) -> None:
        """Remove the file of the last of the first ``count``, which was timed: those of large layers fill a disk."""
        future = self.builds[count - 1]
        if future is None or future in self.builds[count:] or not future.done() or future.exception() is not None:
            return
        built = future.result()
        if isinstance(built, OnDisk) and built.cubin.parent == self._place.folder:
            built.cubin.unlink(missing_ok=True)

    def close(self) -> None:
        """Time no more, and stop building."""
        self._measurements.close()
        self.end()

    def end(self) -> None:
        self._place.stop.set()
        self._pool.shutdown(cancel_futures=True)
        self._remove()
