"""Processes that build kernels at the same time, for whoever has them timed (``trials.py``).

    with Crew(16) as crew:
        compiled = crew.build(problem, candidate, "sass", store)  # from several threads

Machine code is written by Python, as what a family's kernel reads of A is packed, and of that only one thread of a
process runs at a time. Other text goes to compilers, which are processes already.
"""

import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from lospmm.builder import Call, Order, Preparation
from lospmm.errors import GpuFault, ToolchainFault
from lospmm.families import Entrant
from lospmm.gpu.process import WorkerLost, WorkerProcess
from lospmm.memory import memory_bytes
from lospmm.model import Built, Candidate, Compiled, OnDisk, Problem
from lospmm.settings import settings
from lospmm.store import Store

#: -P: the current directory is not searched for modules.
BUILDER = (sys.executable, "-P", "-c", "from lospmm.builder import main; main()")

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
class _Builder:
    process: WorkerProcess
    problem: Problem | None = None  # what it was told last
    built: set[Hashable] = field(default_factory=set)  # of that

    def told(self, problem: Problem) -> Problem | None:
        """What it has to be told of the problem: nothing, if it was the last."""
        if self.problem is problem:
            return None
        self.problem, self.built = problem, set()
        return problem


class Crew:
    """Up to ``size`` builders, none before ``start`` or the first kernel; they end with the block, or with this
    process. For any number of threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._idle: list[_Builder] = []
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
        candidate: Candidate | Entrant,
        emitter: str,
        store: Store,
        cancel: threading.Event | None = None,
        *,
        folder: Path | None = None,
    ) -> Built:
        """The kernel of ``candidate``, its cubin in a new file of ``folder`` if there is one. Raises ToolchainFault,
        also for what this emitter cannot write, and CancelledError; either may cost a builder, and another starts with
        a kernel to come."""

        def order(builder: _Builder) -> Order:
            told = builder.told(problem)
            builder.built.add(candidate)
            return Order(told, candidate, emitter, store, folder)

        built = self._ask(order, cancel)
        assert isinstance(built, Compiled | OnDisk)
        return built

    def prepare(
        self, problem: Problem, entrants: Sequence[Entrant], store: Store, cancel: threading.Event | None = None
    ) -> None:
        """What several plans have in common, by one builder and as many others as are asked to at the same time. Raises
        as ``build``."""
        self._ask(lambda builder: Preparation(builder.told(problem), entrants, store), cancel)

    def call(
        self,
        function: Callable[..., object],
        *arguments: object,
        cancel: threading.Event | None = None,
        who_built: Hashable = None,
    ) -> object:
        """What a function of a module gives in a builder: of those that are idle the one ``who_built`` that candidate
        of its last problem, which still has what took it long. Raises as ``build``."""
        return self._ask(lambda _: Call(function, arguments), cancel, who_built)

    def _ask(
        self,
        request_to: Callable[[_Builder], object],
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

    def _taken(self, who_built: Hashable) -> _Builder | None:
        """An idle one, the last that was at work or the one who built this; no longer idle."""
        with self._choice:
            if not self._idle:
                return None
            at = next((at for at, one in enumerate(self._idle) if who_built in one.built), -1)
            return self._idle.pop(at)

    def _new(self) -> _Builder:
        try:
            return _Builder(WorkerProcess(BUILDER))
        except GpuFault as fault:
            raise ToolchainFault(str(fault)) from None
