"""A runner that times proxies instead of kernels (section 5), for ``--trials proxy``.

Proxies rank kernels; their times mean little by themselves. Long loops are cut by more than short ones, so each time is
divided by the share of loads that the proxy kept (``lospmm_proxies.loops.kept_share``).
"""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from lospmm.errors import GpuFault
from lospmm.families.candidate import Candidate
from lospmm.gpu.bench import Bench
from lospmm.gpu.messages import Measure, Measurement
from lospmm.gpu.timing import BRIEF, Effort
from lospmm.toolchain.compile import Built, Compiled
from lospmm.tuning.proxy_build import compile_proxy, proxies_of
from lospmm.tuning.runner import Begun, GpuRunner
from lospmm_proxies.loops import kept_share
from lospmm_proxies.trial import ProxyKernel

#: The least share of a budget that proxies leave for kernels, and the number of fastest proxies whose kernels are built
#: at once: they get as long as that takes by the speed at which proxies were built.
FINALS_SHARE, FINALISTS = 0.4, 4


class ProxyRunner(GpuRunner):
    """A ``trial.Runner`` that times unrolled candidates by proxies.

    Candidates that differ only in N1 share a proxy. A candidate's time is what its proxy would take with all loads, so
    that all are comparable; it fails if the proxy cannot be built or run. Proxies in machine code are fast to build,
    and are not kept. The kernels of the fastest candidates are timed themselves, as are the plans of other families.
    Time is not up before one of them ran: without, a search by proxies would choose by proxies alone.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.built = 0  # proxies
        self._proxies: dict[Candidate, ProxyKernel] = {}
        self._kernel_ran, self._proxies_ran = False, 0
        self._building: list[tuple[float, int]] = []  # seconds and instructions of built proxies

    @property
    def is_over(self) -> bool:
        """Whether the search must end: a kernel ran, and the rest of the budget is reserved."""
        return self._kernel_ran and super().is_over

    def _known(self, candidate: Candidate, effort: Effort) -> Measurement | None:
        return None if _is_by_proxy(candidate, effort) else super()._known(candidate, effort)

    def _begin_builds(self, candidates: Sequence[Candidate], effort: Effort) -> Sequence[Future[Built]]:
        if not all(_is_by_proxy(one, effort) for one in candidates):
            return super()._begin_builds(candidates, effort)
        threads, place = self._open()
        proxies = proxies_of(self.problem, [one.plan for one in candidates], self.emitter)
        self._proxies |= dict(zip(candidates, proxies, strict=True))
        distinct = {id(one.program): one for one in proxies}
        builds: dict[int, Future[Built]] = {
            key: threads.submit(self._build_proxy, one, place.stop) for key, one in distinct.items()
        }
        self.built += len(builds)
        return [builds[id(one.program)] for one in proxies]

    def _build_proxy(self, proxy: ProxyKernel, stop: threading.Event) -> Built:
        program, began = proxy.program, self.budget.clock()
        if self.builders is None:
            cubin = compile_proxy(self.problem, program, self.emitter, self.store, stop=stop)
        else:
            found = self.builders.call(compile_proxy, self.problem, program, self.emitter, self.store, cancel=stop)
            assert isinstance(found, bytes)
            cubin = found
        self._building.append((self.budget.clock() - began, sum(len(tile.code) for tile in program.tiles)))
        return Compiled(cubin, program.name, proxy.launch)

    def _is_late(self, candidate: Candidate, effort: Effort) -> bool:
        if not _is_by_proxy(candidate, effort):
            return super()._is_late(candidate, effort)
        return self._proxies_ran >= FINALISTS and self.budget.has_only(FINALS_SHARE, self._finals_seconds(candidate))

    def _finals_seconds(self, candidate: Candidate) -> float:
        """Return the seconds to build FINALISTS kernels like the candidate's, with as many compilers as proxies had."""
        matrix, (seconds, instructions) = self.problem.matrix, np.sum(self._building, axis=0)
        of_kernel = int(candidate.plan.tiling.nnc.sum()) + matrix.nnz + matrix.m
        return float(FINALISTS * of_kernel * seconds / instructions / self.workers)

    def _timed(self, begun: deque[Begun], effort: Effort) -> Measurement | None:
        is_by_proxy = _is_by_proxy(begun[0].candidate, effort)
        measurement = super()._timed(begun, effort)
        if measurement is not None and measurement.timing is not None:
            self._proxies_ran += is_by_proxy
            self._kernel_ran = self._kernel_ran or not is_by_proxy
        return measurement

    def _time(self, candidate: Candidate, built: Built, effort: Effort) -> Measurement:
        if not _is_by_proxy(candidate, effort):
            return super()._time(candidate, built, effort)
        proxy = self._proxies[candidate]
        assert isinstance(built, Compiled)
        return time_proxy(self.bench, Compiled(built.cubin, built.entry, proxy.launch), kept_share(proxy), effort)

    def _keep(self, candidate: Candidate, built: Built, effort: Effort, measurement: Measurement) -> None:
        if not _is_by_proxy(candidate, effort):
            super()._keep(candidate, built, effort, measurement)

    def _begin_timing(self, one: Begun, effort: Effort) -> None:
        if not _is_by_proxy(one.candidate, effort):  # proxies take another command of the worker
            super()._begin_timing(one, effort)


def _is_by_proxy(candidate: Candidate, effort: Effort) -> bool:
    return candidate.is_unrolled and effort == BRIEF


def time_proxy(bench: Bench, built: Compiled, kept: float, effort: Effort = BRIEF) -> Measurement:
    """Return a proxy's time over ``kept``, the share of loads it kept. Raises GpuFault without a GPU."""
    bench.start()
    try:
        found = bench.request("proxy", Measure(built.cubin, built.entry, built.launch, bench.cache, effort))
    except GpuFault as fault:
        return Measurement(None, None, str(fault))
    assert isinstance(found, Measurement) and found.timing is not None
    timing = found.timing._replace(micros=found.timing.micros / kept)
    return Measurement(timing, None, None, found.clocks)
