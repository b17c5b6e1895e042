"""Candidates built and timed: kernels are built by several threads, and each is timed as soon as its turn comes.

One kernel at a time runs on the GPU; a lock keeps other tunings of this machine from timing theirs meanwhile.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait

from lospmm.build import Build, build
from lospmm.errors import ToolchainFault, Unsupported
from lospmm.gpu.messages import Measurement
from lospmm.measure import Bench
from lospmm.model import Candidate, Problem
from lospmm.stages import Stages
from lospmm.store import Store

#: How often a wait for a kernel looks whether it was cancelled.
POLL_SECONDS = 0.1


class BuildAndTime:
    """Trials of one problem (``search.Trials``). Kernels that are built are not kept: a winner is built again."""

    def __init__(
        self,
        problem: Problem,
        emitter: str,
        bench: Bench,
        *,
        store: Store,
        workers: int,
        stages: Stages,
    ) -> None:
        self.problem, self.emitter, self.bench = problem, emitter, bench
        self.store, self.workers, self.stages = store, workers, stages
        self.timed = 0

    def __call__(self, candidates: Sequence[Candidate]) -> Iterator[Measurement]:
        """A kernel that cannot be built has failed, as one that cannot be run. Raises GpuFault without a GPU, and
        CancelledError."""
        stop = threading.Event()
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="build")
        try:
            builds = [pool.submit(self._build, candidate, stop) for candidate in candidates]
            total = self.timed + len(builds)
            for future in builds:
                self.stages.progress("measure_trials", self.timed, total)
                yield self._measure(future)
                self.timed += 1
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)

    def _build(self, candidate: Candidate, stop: threading.Event) -> Build:
        return build(self.problem, candidate, self.emitter, store=self.store, workers=1, cancel=stop)

    def _measure(self, future: Future[Build]) -> Measurement:
        with self.stages.part("compile_trials"):
            while not wait([future], POLL_SECONDS).done:
                if self.stages.cancel is not None and self.stages.cancel.is_set():
                    raise CancelledError
            try:
                built = future.result()
            except (ToolchainFault, Unsupported) as error:
                return Measurement(None, None, str(error))
        with self.stages.part("measure_trials"):
            return self.bench.measure(built.binary.cubin, built.program.name, built.launch)
