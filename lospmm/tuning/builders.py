"""Processes that build kernels at the same time, for whoever has them timed (``runner.py``).

    with Crew(16) as crew:
        compiled = crew.build(problem, candidate, "sass", store)  # from several threads

Machine code is written by Python, as what a family's kernel reads of A is packed, and of that only one thread of a
process runs at a time. Other text goes to compilers, which are processes already.
"""

import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from lospmm.errors import GpuFault, ToolchainFault
from lospmm.families import Candidate
from lospmm.gpu.process import WorkerLost, WorkerProcess
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import UnrolledPlan
from lospmm.store import Store
from lospmm.toolchain.compile import Built, Compiled, OnDisk
from lospmm.tuning.builder_process import BuildRequest, CallRequest, PrepareRequest

#: -P: the current directory is not searched for modules.
BUILDER = (sys.executable, "-P", "-c", "from lospmm.tuning.builder_process import main; main()")

#: With fewer cores, threads build as many.
LEAST_BUILDERS = 4

#: As many keep a GPU busy; each holds some hundred megabytes, and A.
MOST_BUILDERS = 16

#: What one has of each nonzero at most, rounded up: a csr plan of 5.7 million took 46. Half of the memory is for it.
BYTES_OF_NONZERO = 64


def builders_for(problem: Problem, size: int) -> int:
    """How many of ``size`` builders may work at the problem at a time, by what memory there is."""
    return max(1, min(size, memory_bytes() // 2 // (BYTES_OF_NONZERO * max(problem.matrix.nnz, 1))))


@dataclass(slots=True, eq=False)
class _BuilderProcess:
    process: WorkerProcess
    problem: Problem | None = None  # what it was told last
    built: set[Hashable] = field(default_factory=set)  # of that

    def told(self, problem: Problem) -> Problem | None:
        """What it has to be told of the problem: nothing, if it was the last."""
        if self.problem is problem:
            return None
        self.problem, self.built = problem, set()
        return problem


class BuilderPool:
    """Up to ``size`` builders, none before ``start`` or the first kernel; they end with the block, or with this
    process. For any number of threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._idle: list[_BuilderProcess] = []
        self._choice = threading.Lock()
        self._turns = threading.BoundedSemaphore(size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Have all builders start, which takes each half a second, while this process does something else."""
        for _ in range(self.size - len(self._idle)):
            self._idle.append(self._new())

    def close(self) -> None:
        """End the builders that are idle."""
        while (builder := self._taken(None)) is not None:
            builder.process.end()

    def build(
        self,
        problem: Problem,
        candidate: UnrolledPlan | Candidate,
        emitter: str,
        store: Store,
        cancel: threading.Event | None = None,
        *,
        folder: Path | None = None,
    ) -> Built:
        """The kernel of ``candidate``, its cubin in a new file of ``folder`` if there is one. Raises ToolchainFault,
        also for what this emitter cannot write, and CancelledError; either may cost a builder, and another starts with
        a kernel to come."""

        def order(builder: _BuilderProcess) -> BuildRequest:
            told = builder.told(problem)
            builder.built.add(candidate)
            return BuildRequest(told, candidate, emitter, store, folder)

        built = self._ask(order, cancel)
        assert isinstance(built, Compiled | OnDisk)
        return built

    def prepare(
        self, problem: Problem, entrants: Sequence[Candidate], store: Store, cancel: threading.Event | None = None
    ) -> None:
        """What several plans have in common, by one builder and as many others as are asked to at the same time. Raises
        as ``build``."""
        self._ask(lambda builder: PrepareRequest(builder.told(problem), entrants, store), cancel)

    def call(
        self,
        function: Callable[..., object],
        *arguments: object,
        cancel: threading.Event | None = None,
        who_built: Hashable = None,
    ) -> object:
        """What a function of a module gives in a builder: of those that are idle the one ``who_built`` that candidate
        of its last problem, which still has what took it long. Raises as ``build``."""
        return self._ask(lambda _: CallRequest(function, arguments), cancel, who_built)

    def _ask(
        self,
        request_to: Callable[[_BuilderProcess], object],
        cancel: threading.Event | None,
        who_built: Hashable = None,
    ) -> object:
        with self._turns:
            if cancel is not None and cancel.is_set():
                raise CancelledError
            builder = self._taken(who_built) or self._new()
            try:
                answer = builder.process.ask(request_to(builder), settings().compile_seconds, cancel)
            except WorkerLost as lost:
                raise ToolchainFault(f"a process that builds kernels: {lost}") from None
            self._idle.append(builder)
        if answer.fault is not None:
            raise ToolchainFault(answer.fault)
        return answer.value

    def _taken(self, who_built: Hashable) -> _BuilderProcess | None:
        """An idle one, the last that was at work or the one who built this; no longer idle."""
        with self._choice:
            if not self._idle:
                return None
            at = next((at for at, one in enumerate(self._idle) if who_built in one.built), -1)
            return self._idle.pop(at)

    def _new(self) -> _BuilderProcess:
        try:
            return _BuilderProcess(WorkerProcess(BUILDER))
        except GpuFault as fault:
            raise ToolchainFault(str(fault)) from None


#: What a container may have (cgroup v2), a number or "max".
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_bytes() -> int:
    """Of the machine, or of the container where that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        return min(machine, int(CONTAINER_LIMIT.read_text()))
    return machine


#: Kernels of a kind that are kept: those that are timed again, and some more.
KEPT = 10


@dataclass(frozen=True, slots=True)
class BuildPlace:
    """Where kernels are left that other processes build, and what ends the building of them."""

    folder: Path
    stop: threading.Event


class PrefetchedBuilds:
    """For one thread, from when it is made until it is closed, after which nothing of it may be run."""

    def __init__(self, kept: int = KEPT) -> None:
        self._most = kept
        folder = Path(tempfile.mkdtemp(prefix="lospmm-stock-"))
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)  # should nobody close it
        self._place = BuildPlace(folder, threading.Event())
        self._pool: ThreadPoolExecutor | None = None
        self._begun: dict[Hashable, Future[Built]] = {}
        self._kept: dict[Hashable, tuple[float, Built]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, candidates: Sequence[Hashable], build: Callable[..., Built], workers: int) -> None:
        """Have ``build(candidate, place)`` of each called from now on, by ``workers`` threads."""
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="build ahead")
        self._begun |= {one: self._pool.submit(build, one, self._place) for one in dict.fromkeys(candidates)}

    def take(self, candidate: Hashable) -> Future[Built] | None:
        """The kernel of a candidate, which may be under way; None where it is not in stock."""
        if (kept := self.kept(candidate)) is None:
            return self._begun.get(candidate)
        done: Future[Built] = Future()
        done.set_result(kept)
        return done

    def keep(self, candidate: Hashable, built: Built, micros: float) -> None:
        """A kernel that took so long: kept as long as it is among the fastest of its kind, candidates or plans, each of
        which has finals of its own. Its file may be removed."""
        others = [one for one in self._kept if type(one) is type(candidate)]
        slowest = max(others, key=lambda one: self._kept[one][0], default=None)
        is_full = len(others) >= self._most
        if candidate in self._kept or (is_full and self._kept[slowest][0] <= micros):
            return
        if isinstance(built, OnDisk):
            own = self._place.folder / f"kept-{built.cubin.name}"
            try:
                os.link(built.cubin, own)
            except OSError:  # then it is built again
                return
            built = OnDisk(own, built.entry, built.launch)
        self._kept[candidate] = micros, built
        if is_full:
            _, dropped = self._kept.pop(slowest)
            if isinstance(dropped, OnDisk):
                with suppress(OSError):
                    dropped.cubin.unlink()

    def kept(self, candidate: Hashable) -> Built | None:
        """A kernel that is built and was timed."""
        return self._kept[candidate][1] if candidate in self._kept else None

    def close(self) -> None:
        """Build no more, and remove all."""
        self._place.stop.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._remove()
