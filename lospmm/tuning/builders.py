"""Builders, processes that build kernels in parallel, and the built kernels of a tuning.

    with BuilderPool(16) as builders:
        kernel = builders.call(build_into, problem, candidate, "sass", store, folder)  # from several threads

Python writes machine code and packs A for the other families, and runs one thread of a process at a time. Other
languages need no builders: their compilers are processes already. ``runner.py`` times the kernels.
"""

import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from lospmm.errors import DiskFault, GpuFault, ToolchainFault
from lospmm.families.candidate import Candidate
from lospmm.gpu.process import WorkerLost, WorkerProcess
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.toolchain.compile import Built, OnDisk

#: -P: the current directory is not searched for modules.
BUILDER = (sys.executable, "-P", "-c", "from lospmm.tuning.builder_process import main; main()")

#: With fewer cores, threads are as fast.
LEAST_BUILDERS = 4

#: Enough to keep a GPU busy; each takes some hundred megabytes, plus A.
MOST_BUILDERS = 16

#: The most bytes per nonzero that a builder takes, rounded up: A takes 8, and packing a group_coo plan 47 more.
#: Builders may take half of the memory.
BYTES_OF_NONZERO = 64


def builders_for(problem: Problem, size: int) -> int:
    """Return how many of ``size`` builders may work on the problem at a time, given the memory."""
    return max(1, min(size, memory_bytes() // 2 // (BYTES_OF_NONZERO * max(problem.matrix.nnz, 1))))


@dataclass(slots=True, eq=False)
class _BuilderProcess:
    process: WorkerProcess
    problem: Problem | None = None  # of its last call, which it keeps


class BuilderPool:
    """Up to ``size`` builders, started by ``start`` or on demand, until the block or this process ends.

    Any number of threads may use it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._idle: list[_BuilderProcess] = []
        self._turns = threading.BoundedSemaphore(size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start all builders, without waiting for them: each takes half a second."""
        for _ in range(self.size - len(self._idle)):
            self._idle.append(self._new())

    def close(self) -> None:
        """End the idle builders."""
        while (builder := self._taken()) is not None:
            builder.process.end()

    def call(
        self,
        function: Callable[..., object],
        problem: Problem,
        *arguments: object,
        cancel: threading.Event | None = None,
    ) -> object:
        """Call a module's ``function(problem, *arguments)`` in a builder.

        Raises ToolchainFault, also if the emitter cannot write a kernel, and CancelledError. Either may end a builder;
        a later call starts another.
        """
        with self._turns:
            if cancel is not None and cancel.is_set():
                raise CancelledError
            builder = self._taken() or self._new()
            given = None if builder.problem is problem else problem
            builder.problem = problem
            try:
                answer = builder.process.ask((function, given, arguments), settings().compile_seconds, cancel)
            except WorkerLost as lost:
                raise ToolchainFault(f"a process that builds kernels: {lost}") from None
            self._idle.append(builder)
        if answer.fault is not None:
            raise (DiskFault if answer.is_disk else ToolchainFault)(answer.fault)
        return answer.value

    def _taken(self) -> _BuilderProcess | None:
        """Take the idle builder that was used last; None if all are busy."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _new(self) -> _BuilderProcess:
        try:
            return _BuilderProcess(WorkerProcess(BUILDER))
        except GpuFault as fault:
            raise ToolchainFault(str(fault)) from None


#: The memory limit of a container (cgroup v2), in bytes or "max".
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_bytes() -> int:
    """Return the memory of the machine, or of the container if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        return min(machine, int(CONTAINER_LIMIT.read_text()))
    return machine


#: Unrolled kernels that are kept, and kernels of other families: those that are timed again, and some more.
KEPT = 10


class BuildPlace:
    """A temporary folder for kernels that other processes build, and the event that cancels the builds."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lospmm-kernels-"))
        self.stop = threading.Event()
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)  # without ``close`` too

    def close(self, pool: ThreadPoolExecutor | None) -> None:
        """Cancel the builds, wait for the threads of ``pool``, and delete the folder."""
        self.stop.set()
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        self._remove()


class PrefetchedBuilds:
    """Built kernels of one tuning: prefetched, or kept because they were fast.

    For one thread. Its kernels may not be run after ``close``, which deletes them.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._most = kept
        self._made: BuildPlace | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._begun: dict[Candidate, Future[Built]] = {}
        self._kept: dict[Candidate, tuple[float, Built]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _place(self) -> BuildPlace:
        """The folder of the kernels, made on its first use: a tuning without a GPU leaves none behind."""
        if self._made is None:
            self._made = BuildPlace()
        return self._made

    def begin(self, candidate: Candidate, build: Callable[[Candidate, BuildPlace], Built]) -> None:
        """Start ``build(candidate, place)`` in a thread."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="build ahead")
        self._begun[candidate] = self._pool.submit(build, candidate, self._place)

    def take(self, candidate: Candidate) -> Future[Built] | None:
        """Return the kernel of a candidate, possibly still being built; None if there is none."""
        if (kept := self.kept(candidate)) is None:
            return self._begun.get(candidate)
        done: Future[Built] = Future()
        done.set_result(kept)
        return done

    def keep(self, candidate: Candidate, built: Built, micros: float) -> None:
        """Keep a kernel that took ``micros``, while it is among the fastest.

        Unrolled kernels and others are ranked apart, as each have finals. The kernel's own file may be removed after.
        """
        others = [one for one in self._kept if one.is_unrolled == candidate.is_unrolled]
        slowest = max(others, key=lambda one: self._kept[one][0], default=candidate)
        is_full = len(others) >= self._most
        if candidate in self._kept or (is_full and self._kept[slowest][0] <= micros):
            return
        if isinstance(built, OnDisk):
            own = self._place.folder / f"kept-{built.cubin.name}"
            try:
                os.link(built.cubin, own)
            except OSError:  # it is built again if needed
                return
            built = replace(built, cubin=own)
        self._kept[candidate] = micros, built
        if is_full:
            _, dropped = self._kept.pop(slowest)
            if isinstance(dropped, OnDisk):
                with suppress(OSError):
                    dropped.cubin.unlink()

    def kept(self, candidate: Candidate) -> Built | None:
        """Return a kernel that was timed and kept; None if it was not."""
        return self._kept[candidate][1] if candidate in self._kept else None

    def close(self) -> None:
        """Cancel the builds and delete all kernels."""
        if self._made is not None:
            self._made.close(self._pool)
