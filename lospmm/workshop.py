"""What the tunings of one process have in common, so that the second does not pay again for what the first has started.

with Workshop(workers=16) as workshop:
    for request in requests:
        jobs.tune(request, store=store, workshop=workshop)
"""

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Self

from lospmm.baselines import DENSE, BaselineTime
from lospmm.crew import LEAST_BUILDERS, MOST_BUILDERS, Crew
from lospmm.device import DeviceSpec
from lospmm.errors import ToolchainFault
from lospmm.measure import Bench
from lospmm.model import Problem
from lospmm.space import Space


class Workshop:
    """The processes that build kernels and the one that runs them, each from when it is first asked for until the block
    ends. For one tuning at a time."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._stack = ExitStack()
        self._crew: Crew | None = None
        self._bench: Bench | None = None
        self._dense: dict[Shape, Mapping[str, BaselineTime]] = {}
        self._stop = threading.Event()
        self._ahead: ThreadPoolExecutor | None = None
        self._spaces: dict[Place, Future[Space]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        self._stop.set()
        self._stack.close()
        self._crew = self._bench = self._ahead = None

    def crew(self, emitter: str) -> Crew | None:
        """Processes that build kernels, started; None where threads do as well: compilers are processes already."""
        if emitter != "sass" or self.workers < LEAST_BUILDERS:
            return None
        if self._crew is None:
            self._crew = self._stack.enter_context(Crew(min(self.workers, MOST_BUILDERS)))
            self._crew.start()
        return self._crew

    def explore_ahead(self, problem: Problem, emitter: str, splits: tuple[int, ...]) -> None:
        """Have one of the builders explore the space of a tuning to come; without builders that is left to it."""
        place = _place(problem, splits)
        if (crew := self.crew(emitter)) is not None and place not in self._spaces:
            if self._ahead is None:
                self._ahead = self._stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="ahead"))
            self._spaces[place] = self._ahead.submit(crew.explore, problem, splits, self._stop)

    def explored(self, problem: Problem, splits: tuple[int, ...]) -> Space | None:
        """What ``explore_ahead`` was asked for, once. None for anything else, and where it failed."""
        future = self._spaces.pop(_place(problem, splits), None)
        try:
            return None if future is None else future.result()
        except ToolchainFault:
            return None

    def bench(self, problem: Problem, cancel: threading.Event | None) -> Bench:
        """The process that runs kernels, with this problem."""
        if self._bench is None:
            self._bench = self._stack.enter_context(Bench(problem, cancel=cancel))
        else:
            self._bench.turn_to(problem, cancel)
        return self._bench

    def known(self, problem: Problem) -> Mapping[str, BaselineTime]:
        """Times of libraries that ``learn`` was told for another matrix of this shape."""
        return self._dense.get(_shape(problem), {})

    def learn(self, problem: Problem, times: Mapping[str, BaselineTime]) -> None:
        found = {name: times[name] for name in DENSE if name in times and times[name].micros is not None}
        self._dense[_shape(problem)] = found


#: What decides a space: the matrix, n, the device, and the splits.
Place = tuple[str, int, DeviceSpec, tuple[int, ...]]


def _place(problem: Problem, splits: tuple[int, ...]) -> Place:
    return problem.matrix.fingerprint, problem.n, problem.device, splits


#: What decides the time of a dense product: m, k, n and the type.
Shape = tuple[int, int, int, str]


def _shape(problem: Problem) -> Shape:
    return problem.matrix.m, problem.matrix.k, problem.n, problem.dtype.name
