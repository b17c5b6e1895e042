"""The resources that tunings of a process share: builders, the GPU worker, searches made ahead.

with Session(workers=16) as session:
    for request in requests:
        jobs.tune(request, store=store, session=session)
"""

import sys
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Self

from lospmm.artifact.artifact import Artifact
from lospmm.errors import ToolchainFault
from lospmm.gpu.bench import Bench
from lospmm.gpu.messages import CACHE_STATES
from lospmm.problem.problem import Problem
from lospmm.tuning.alike import TimedLayers
from lospmm.tuning.builders import LEAST_BUILDERS, MOST_BUILDERS, BuilderPool, PrefetchedBuilds
from lospmm.tuning.options import Options

#: Layers that are searched ahead: a large one takes longer to search than a small one to time.
AHEAD = 2

#: Python's switch interval: how long a thread that builds a kernel may delay the one that times another.
SWITCH_SECONDS = 0.0005


class Session:
    """The builders and the worker that runs kernels, started on first use, ended with the block.

    For one tuning at a time. ``workers`` is the most builders or compilers at a time; ``layers`` are those that other
    sessions timed.
    """

    def __init__(self, workers: int, layers: TimedLayers | None = None) -> None:
        self.workers = workers
        self._stack = ExitStack()
        self._builders: BuilderPool | None = None
        self._bench: Bench | None = None
        self.layers = layers or TimedLayers()
        self.stored: str | None = None  # digest of the last kernel that was stored, whose A the next one may have
        self._stop = threading.Event()
        self._ahead: ThreadPoolExecutor | None = None
        self._begun: dict[Hashable, tuple[Future[object] | None, PrefetchedBuilds]] = {}
        self._read: dict[str, Future[Artifact | None]] = {}

    def __enter__(self) -> Self:
        self._stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the builders and the worker."""
        self._stop.set()
        self._stack.close()
        self._builders = self._bench = self._ahead = None

    def builders(self, emitter: str) -> BuilderPool | None:
        """Return the builders; None if threads are as fast, as other emitters' compilers are processes."""
        if emitter != "sass" or self.workers < LEAST_BUILDERS:
            return None
        if self._builders is None:
            self._builders = self._stack.enter_context(BuilderPool(min(self.workers, MOST_BUILDERS)))
            self._builders.start()
        return self._builders

    def begin_ahead(self, problem: Problem, options: Options, search: Callable[..., object]) -> PrefetchedBuilds | None:
        """Call a module's ``search(problem, options)`` in a builder for a later tuning.

        Returns the builds of that tuning, for the caller to begin some; None, and does nothing, if it was begun, or
        without builders: the tuning then searches itself.
        """
        name, builders = _named(problem, options), self.builders(options.emitter)
        if builders is None or name in self._begun:
            return None
        found = self._threads().submit(builders.call, search, problem, options, cancel=self._stop)
        self._begun[name] = found, self._stack.enter_context(PrefetchedBuilds())
        return self._begun[name][1]

    def read_ahead(self, digest: str, read: Callable[[], Artifact | None]) -> None:
        """Call ``read``, which returns a stored kernel, in a thread, unless it was called for this digest."""
        if digest not in self._read:
            self._read[digest] = self._threads().submit(read)

    def taken(self, digest: str) -> Artifact | None:
        """Return what ``read_ahead`` found, once; None if it was not called. Raises what ``read`` raised."""
        found = self._read.pop(digest, None)
        return None if found is None else found.result()

    def _threads(self) -> ThreadPoolExecutor:
        if self._ahead is None:
            self._ahead = self._stack.enter_context(ThreadPoolExecutor(2, thread_name_prefix="ahead"))
        return self._ahead

    def begun_ahead(self, problem: Problem, options: Options) -> tuple[object | None, PrefetchedBuilds]:
        """Return what the search begun for a tuning found, None if there was none or it failed; and its builds.

        Once: another call gets None and empty builds. The caller closes them.
        """
        found, builds = self._begun.pop(_named(problem, options), (None, PrefetchedBuilds()))
        try:
            return None if found is None else found.result(), builds
        except ToolchainFault:
            return None, builds

    def bench(self, problem: Problem, cancel: threading.Event | None, cache: str = "cold") -> Bench:
        """Return the worker that runs kernels, which may still be starting, for this problem and cache state."""
        if self._bench is None:
            self._bench = self._stack.enter_context(Bench(problem, cancel=cancel))
        else:
            self._bench.turn_to(problem, cancel)
        self._bench.cache = CACHE_STATES[cache]
        self._bench.open()
        return self._bench


def _named(problem: Problem, options: Options) -> Hashable:
    """Return a key that identifies a tuning in this process."""
    layer = problem.convolution, problem.epilogue, problem.dtype, problem.sums, problem.values
    return problem.matrix.fingerprint, problem.n, problem.device, layer, options
