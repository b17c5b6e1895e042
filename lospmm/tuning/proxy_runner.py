"""A runner that times proxies instead of kernels (section 5), for ``--trials proxy``.

Proxies rank kernels; their times mean little by themselves. Long loops are cut by more than short ones, so each time is
divided by the share of loads that the proxy kept (``lospmm_proxies.loops.kept_share``).
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from lospmm.errors import GpuFault
from lospmm.families.candidate import Candidate
from lospmm.gpu import proxy
from lospmm.gpu.bench import Bench
from lospmm.gpu.messages import Measure, Measurement, Shape
from lospmm.gpu.timing import BRIEF, Effort
from lospmm.toolchain.compile import Built, Compiled
from lospmm.tuning.proxy_build import compile_proxy, proxies_of
from lospmm.tuning.runner import Begun, GpuRunner
from lospmm_proxies.loops import kept_share
from lospmm_proxies.trial import ProxyKernel

#: The share of a budget that proxies leave for the kernels of the fastest.
FINALS_SHARE = 0.4


class ProxyRunner(GpuRunner):
    """A ``trial.Runner`` that times unrolled candidates by proxies.

    Candidates that differ only in N1 share a proxy. A candidate's time is what its proxy would take with all loads, so
    that all are comparable; it fails if the proxy cannot be built or run. Proxies in machine code are fast to build,
    and are not kept. The kernels of the fastest candidates are timed themselves, as are the plans of other families.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.built = 0  # proxies
        self._proxies: dict[Candidate, ProxyKernel] = {}

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
        program, arch = proxy.program, self.problem.device.arch
        if self.builders is None:
            cubin = compile_proxy(program, self.emitter, arch, self.store, stop=stop)
        else:
            found = self.builders.call(compile_proxy, program, self.emitter, arch, self.store, cancel=stop)
            assert isinstance(found, bytes)
            cubin = found
        return Compiled(cubin, program.name, proxy.launch)

    def _is_late(self, candidate: Candidate, effort: Effort) -> bool:
        is_enough = _is_by_proxy(candidate, effort) and self._ran and self.budget.has_only(FINALS_SHARE)
        return is_enough or super()._is_late(candidate, effort)

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
    shape = Shape(built.launch.grid, built.launch.block, built.launch.shared_bytes)
    try:
        found = bench.request(proxy.COMMAND, Measure(built.cubin, built.entry, shape, False, bench.cache, effort))
    except GpuFault as fault:
        return Measurement(None, None, str(fault))
    assert isinstance(found, Measurement) and found.timing is not None
    timing = found.timing._replace(micros=found.timing.micros / kept)
    return Measurement(timing, None, None, found.clocks)
