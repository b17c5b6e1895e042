"""What the tunings of one process have in common, so that the second does not pay again for what the first has started.

with Workshop(workers=16) as workshop:
    for request in requests:
        jobs.tune(request, store=store, workshop=workshop)
"""

import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from lospmm.errors import ToolchainFault
from lospmm.gpu.bench import Bench
from lospmm.gpu.libraries import DENSE, BaselineTime
from lospmm.gpu.messages import CACHE_STATES
from lospmm.problem.problem import Problem
from lospmm.tuning.builders import LEAST_BUILDERS, MOST_BUILDERS, BuilderPool, PrefetchedBuilds

#: Layers that are looked at before their turn: a large one takes longer to explore than a small one to be timed.
AHEAD = 2

#: How long a thread that writes a kernel down may keep Python's lock from the one that times another on the GPU.
SWITCH_SECONDS = 0.0005


@dataclass(frozen=True, slots=True, eq=False)
class BegunCall:
    """A call that was begun for a tuning to come."""

    arguments: tuple[object, ...]
    future: Future[object]

    def found(self) -> object | None:
        """What it gives, in the end; None where it failed."""
        try:
            return self.future.result()
        except ToolchainFault:
            return None


class Session:
    """The processes that build kernels and the one that runs them, each from when it is first asked for until the block
    ends. For one tuning at a time."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._stack = ExitStack()
        self._crew: BuilderPool | None = None
        self._bench: Bench | None = None
        self._dense: dict[Shape, Mapping[str, BaselineTime]] = {}
        self._stop = threading.Event()
        self._ahead: ThreadPoolExecutor | None = None
        self._begun: dict[Hashable, BegunCall] = {}
        self._stocks: dict[Hashable, PrefetchedBuilds] = {}

    def __enter__(self) -> Self:
        self._stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        self._stop.set()
        self._stack.close()
        self._crew = self._bench = self._ahead = None

    def crew(self, emitter: str) -> BuilderPool | None:
        """Processes that build kernels, started; None where threads do as well: compilers are processes already."""
        if emitter != "sass" or self.workers < LEAST_BUILDERS:
            return None
        if self._crew is None:
            self._crew = self._stack.enter_context(BuilderPool(min(self.workers, MOST_BUILDERS)))
            self._crew.start()
        return self._crew

    def begin_ahead(self, name: Hashable, emitter: str, function: Callable[..., object], *arguments: object) -> None:
        """Have one of the builders call a function of a module for a tuning to come, which asks for it by ``name``;
        without builders that is left to it."""
        if (crew := self.crew(emitter)) is not None and name not in self._begun:
            if self._ahead is None:
                self._ahead = self._stack.enter_context(ThreadPoolExecutor(2, thread_name_prefix="ahead"))
            future = self._ahead.submit(crew.call, function, *arguments, cancel=self._stop)
            self._begun[name] = BegunCall(arguments, future)

    def begun_ahead(self, name: Hashable) -> object | None:
        """What ``begin_ahead`` was asked for, once. None for anything else, and where it failed."""
        begun = self._begun.pop(name, None)
        return None if begun is None else begun.found()

    def done_ahead(self) -> Iterator[tuple[Hashable, BegunCall]]:
        """What of ``begin_ahead`` is done, was not asked for yet and has nothing in stock, by name."""
        begun = [(name, one) for name, one in self._begun.items() if one.future.done()]
        yield from [(name, one) for name, one in begun if name not in self._stocks]

    def stock(self, name: Hashable) -> PrefetchedBuilds:
        """Of a tuning: what it has in stock already, or an empty one. Whoever tunes closes it."""
        return self._stocks.pop(name) if name in self._stocks else PrefetchedBuilds()

    def stock_ahead(self, name: Hashable) -> PrefetchedBuilds:
        """The same for a tuning to come."""
        self._stocks[name] = self._stack.enter_context(PrefetchedBuilds())
        return self._stocks[name]

    def bench(self, problem: Problem, cancel: threading.Event | None, cache: str = "cold") -> Bench:
        """The process that runs kernels, with this problem, and times them with the cache in this state."""
        if self._bench is None:
            self._bench = self._stack.enter_context(Bench(problem, cancel=cancel))
        else:
            self._bench.turn_to(problem, cancel)
        self._bench.cache = CACHE_STATES[cache]
        return self._bench

    def known(self, problem: Problem, cache: str) -> Mapping[str, BaselineTime]:
        """Times of libraries that ``learn`` was told for another matrix of this shape, timed so."""
        return self._dense.get(_shape(problem, cache), {})

    def learn(self, problem: Problem, cache: str, times: Mapping[str, BaselineTime]) -> None:
        found = {name: times[name] for name in DENSE if name in times and times[name].micros is not None}
        self._dense[_shape(problem, cache)] = found


#: What decides the time of a dense product: m, k, n, the type, and what is in the cache.
Shape = tuple[int, int, int, str, str]


def _shape(problem: Problem, cache: str) -> Shape:
    return problem.matrix.m, problem.matrix.k, problem.n, problem.dtype.name, cache
