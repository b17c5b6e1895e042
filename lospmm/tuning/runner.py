"""The runner that builds candidates in parallel and times them on a GPU, in order, one at a time.

A lock keeps other tunings on this machine from timing kernels at the same time.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Self

from lospmm.errors import BadRequest, DiskFault, ToolchainFault
from lospmm.families.candidate import Candidate
from lospmm.gpu.bench import AGAIN, Bench
from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import BRIEF, Effort
from lospmm.problem.problem import Problem
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.toolchain.compile import Built, OnDisk
from lospmm.tuning.budget import Budget
from lospmm.tuning.build import build, build_into, prepare, shares_packing
from lospmm.tuning.builders import BuilderPool, BuildPlace, PrefetchedBuilds
from lospmm.tuning.history import History
from lospmm.tuning.trial import Trial

#: Interval at which a wait for a build checks for cancellation and the end of time.
POLL_SECONDS = 0.1

#: The least time limit of a kernel on the GPU, even if less is left of the budget.
LEAST_KERNEL_SECONDS = 1.0


class Begun(NamedTuple):
    """A candidate whose kernel is being built, or whose measurement is known."""

    candidate: Candidate
    known: Measurement | None
    build: Future[Built] | None

    @property
    def built(self) -> Built | None:
        """The kernel, if its build has ended well."""
        future = self.build
        return None if future is None or not future.done() or future.exception() is not None else future.result()


class GpuRunner:
    """A ``trial.Runner`` that times the kernels of one problem's candidates.

    Most kernels are deleted once they were timed. ``builders`` build them; None: threads of this process do.
    ``history_of`` returns the history of a candidate's language, ``prefetched`` holds kernels that are built already.
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
        builders: BuilderPool | None = None,
        history_of: Callable[[Candidate], History | None] = lambda _candidate: None,
        budget: Budget | None = None,
        prefetched: PrefetchedBuilds | None = None,
    ) -> None:
        self.problem, self.emitter, self.bench = problem, emitter, bench
        self.store, self.workers, self.stages = store, workers, stages
        self.builders, self.history_of, self.prefetched = builders, history_of, prefetched
        self.budget = budget or Budget()
        self.asked = 0
        self.timed = 0  # candidates timed, failed, or known from the history
        self.measured = 0  # those that ran on the GPU
        self._ran = False
        self._begun: deque[Begun] = deque()
        self._histories: set[History] = set()  # with new measurements
        self._threads: ThreadPoolExecutor | None = None
        self._place: BuildPlace | None = None

    def __enter__(self) -> Self:
        """Return the runner; it is dropped when the block ends."""
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel the builds."""
        self.drop()

    @property
    def is_over(self) -> bool:
        """Whether the search must end: the rest of the budget is reserved."""
        return self.budget.is_over

    def begin(self, candidates: Sequence[Candidate]) -> None:
        """Start to build ``candidates``, which are timed after those begun before."""
        self._begun += self._builds_of(candidates, BRIEF)

    def trials(self, count: int) -> Iterator[Trial]:
        """Time the next ``count`` candidates begun, briefly; once one ran, stop when the budget is over.

        A candidate fails if its kernel cannot be built or run. Raises GpuFault without a GPU, and CancelledError.
        """
        for _ in range(min(count, len(self._begun))):
            one = self._begun[0]
            measurement = self._timed(self._begun, BRIEF)
            if measurement is None:
                return
            yield Trial(one.candidate, measurement)
            if self._is_late(one.candidate, BRIEF):
                return

    def again(self, candidates: Sequence[Candidate]) -> Iterator[Measurement]:
        """Time each of ``candidates`` once more, with more replays."""
        begun = deque(self._builds_of(candidates, AGAIN))
        while begun and (measurement := self._timed(begun, AGAIN)) is not None:
            yield measurement

    def drop(self) -> None:
        """Cancel the builds of candidates that were begun and not timed, and forget them; store what was measured."""
        self._begun.clear()
        if self._place is not None:
            self._place.close(self._threads)
            self._place = self._threads = None
        for history in self._histories:
            history.save()

    def _builds_of(self, candidates: Sequence[Candidate], effort: Effort) -> list[Begun]:
        known = [self._known(one, effort) for one in candidates]
        unknown = [one for one, found in zip(candidates, known, strict=True) if found is None]
        begun = iter(self._begin_builds(unknown, effort) if unknown else ())
        self.asked += len(candidates)
        pairs = zip(candidates, known, strict=True)
        return [Begun(one, found, None if found is not None else next(begun)) for one, found in pairs]

    def _known(self, candidate: Candidate, effort: Effort) -> Measurement | None:
        history = self.history_of(candidate)
        return None if history is None else history.take(candidate, effort)

    def _open(self) -> tuple[ThreadPoolExecutor, BuildPlace]:
        """Return the threads that build, and the place of their kernels; they are created on first use."""
        if self._threads is None or self._place is None:
            self._place = BuildPlace()
            self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="build")
        return self._threads, self._place

    def _begin_builds(self, candidates: Sequence[Candidate], effort: Effort) -> Sequence[Future[Built]]:
        """Start to build ``candidates``, each distinct one once; return a future for each."""
        threads, place = self._open()
        shared = [one for one in dict.fromkeys(candidates) if shares_packing(self.problem, one)]
        if self.builders is not None and shared:
            for _ in range(self.workers):  # a failure here recurs in the builds, which report it
                threads.submit(self.builders.call, prepare, self.problem, shared, self.store, cancel=place.stop)
        builds: dict[Candidate, Future[Built]] = {}
        distinct = dict.fromkeys(candidates)
        compilers = 1 if effort == BRIEF else max(1, self.workers // len(distinct))  # finals have all cores
        for one in distinct:
            kept = None if self.prefetched is None else self.prefetched.take(one)
            builds[one] = threads.submit(self._build, one, place, compilers) if kept is None else kept
        return [builds[one] for one in candidates]

    def _build(self, candidate: Candidate, place: BuildPlace, compilers: int) -> Built:
        if self.builders is not None:
            return build_elsewhere(self.builders, self.problem, self.emitter, self.store, candidate, place)
        own = self.problem, candidate, self.emitter
        return build(*own, store=self.store, workers=compilers, cancel=place.stop).compiled

    def _timed(self, begun: deque[Begun], effort: Effort) -> Measurement | None:
        """Time the first of ``begun`` and remove it; None if time is up before its kernel is built."""
        self.stages.progress("measure_trials", self.timed, self.asked)
        one = begun[0]
        measurement = one.known if one.build is None else self._measured(one.candidate, one.build, effort)
        if measurement is None:
            return None
        begun.popleft()
        self._ran = self._ran or measurement.timing is not None
        self.timed += 1
        self._unlink(one, begun)
        if begun:
            self._begin_timing(begun[0], effort)
        return measurement

    def _measured(self, candidate: Candidate, future: Future[Built], effort: Effort) -> Measurement | None:
        with self.stages.part("compile_trials"):
            if not is_built(future, self.stages, lambda: self._is_late(candidate, effort)):
                return None
            try:
                built = future.result()
            except DiskFault:  # no candidate's fault: the others would fail too
                raise
            except (ToolchainFault, BadRequest) as error:
                return Measurement(None, None, str(error))
        with self.stages.part("measure_trials"):
            self.bench.start()  # waits until the GPU has started, which is no measurement
            if self._ran:
                self.bench.kernel_seconds = max(self.budget.left, LEAST_KERNEL_SECONDS)
            with self.budget.measuring():
                measurement = self._time(candidate, built, effort)
            self.measured += 1
            self._keep(candidate, built, effort, measurement)
        return measurement

    def _is_late(self, _candidate: Candidate, _effort: Effort) -> bool:
        """Return whether to wait for no further kernel: one ran, and time is up."""
        return self._ran and self.is_over

    def _time(self, _candidate: Candidate, built: Built, effort: Effort) -> Measurement:
        return self.bench.measure(built.cubin, built.entry, built.launch, effort=effort)

    def _keep(self, candidate: Candidate, built: Built, effort: Effort, measurement: Measurement) -> None:
        """Add the measurement to the history, and keep a fast kernel for its finals.

        Kernels of other families are kept only on disk: in memory, ten of a large layer take 1 GB.
        """
        if (history := self.history_of(candidate)) is not None:
            history.add(candidate, effort, measurement)
            self._histories.add(history)
        if self.prefetched is None or measurement.timing is None:
            return
        if candidate.is_unrolled or isinstance(built, OnDisk):
            self.prefetched.keep(candidate, built, measurement.timing.micros)

    def _begin_timing(self, one: Begun, effort: Effort) -> None:
        """Let the GPU start the next kernel, if it is built, while the caller handles the last result."""
        if isinstance(built := one.built, OnDisk) and not self.budget.is_over:
            self.bench.begin(built.cubin, built.entry, built.launch, effort=effort)

    def _unlink(self, timed: Begun, left: Sequence[Begun]) -> None:
        """Delete the file of a timed kernel, unless it is still to be timed: large ones fill a disk."""
        is_asked, place = any(one.build is timed.build for one in left), self._place
        if isinstance(built := timed.built, OnDisk) and place and built.cubin.parent == place.folder and not is_asked:
            built.cubin.unlink(missing_ok=True)


def build_elsewhere(
    builders: BuilderPool, problem: Problem, emitter: str, store: Store, candidate: Candidate, place: BuildPlace
) -> OnDisk:
    """Build the kernel of ``candidate`` into ``place`` by one of the builders. Raises as ``BuilderPool.call``."""
    built = builders.call(build_into, problem, candidate, emitter, store, place.folder, cancel=place.stop)
    assert isinstance(built, OnDisk)
    return built


def is_built(future: Future[Built], stages: Stages, is_over: Callable[[], bool] = lambda: False) -> bool:
    """Wait until a build ends; return False if time is up before. Raises CancelledError."""
    while not wait([future], POLL_SECONDS).done:
        if stages.cancel is not None and stages.cancel.is_set():
            raise CancelledError
        if is_over():
            return False
    return True
