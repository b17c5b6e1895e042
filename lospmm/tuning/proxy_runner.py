"""Proxies built and timed in the stead of kernels (section 5): the trials of ``--trials proxy``.

A proxy's time says nothing by itself. It stands for the order of the kernels, so what is told of each is its time over
the share of the loads that it kept (``lospmm_proxies.loops.kept_share``): long loops are cut by more than short ones.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType

from lospmm.codegen import emit
from lospmm.codegen.ir import KernelProgram
from lospmm.errors import GpuFault
from lospmm.gpu import proxy
from lospmm.gpu.bench import Bench
from lospmm.gpu.messages import Measure, Measurement, Shape
from lospmm.gpu.timing import BRIEF, Effort
from lospmm.problem.problem import Launch, Problem
from lospmm.space.candidates import UnrolledPlan
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.toolchain.compile import Built, Compiled, compile_kernel
from lospmm.tuning.builders import BuildPlace
from lospmm.tuning.runner import GpuRunner, RunnerSetup, RunningTrials
from lospmm_proxies import proxies
from lospmm_proxies.launch import kernel_launch, proxy_launch
from lospmm_proxies.loops import kept_share
from lospmm_proxies.trial import ProxyKernel

#: By emitter, where it is not that of section 5.2. A proxy as machine code has its kernel's registers, hence its
#: occupancy; the shared memory of Equation 6 made the order of short kernels worse (docs/results.md).
LAUNCHES: Mapping[str, Callable[[Problem, UnrolledPlan], Launch]] = MappingProxyType({"sass": kernel_launch})


class ProxyRunner(GpuRunner):
    """Trials of one problem (``trial.Trials``) by proxies; candidates that differ in N1 alone share one.

    What is told of a candidate is the time that its proxy would take with all loads, of the whole order comparable. A
    proxy that cannot be built or run has failed.
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
        means: RunnerSetup | None = None,
    ) -> None:
        super().__init__(
            problem,
            emitter,
            bench,
            store=store,
            workers=workers,
            stages=stages,
            means=means or RunnerSetup(effort=BRIEF),
        )
        self.built = 0  # proxies
        self._trials: dict[UnrolledPlan, ProxyKernel] = {}

    def begin(
        self, candidates: Sequence[UnrolledPlan], pool: ThreadPoolExecutor, place: BuildPlace
    ) -> Sequence[Future[Built]]:
        trials = proxies_of(self.problem, candidates, self.emitter)
        self._trials |= dict(zip(candidates, trials, strict=True))
        distinct = {id(trial.program): trial for trial in trials}
        builds: dict[int, Future[Built]] = {
            key: pool.submit(self._build, trial, place.stop) for key, trial in distinct.items()
        }
        self.built += len(builds)
        return [builds[id(trial.program)] for trial in trials]

    def begin_timing(self, begun: RunningTrials, at: int) -> None:
        """Nothing: a proxy is asked for in another way."""

    def time(self, candidate: UnrolledPlan, built: Built) -> Measurement:
        trial = self._trials[candidate]
        assert isinstance(built, Compiled)
        own = Compiled(built.cubin, built.entry, trial.launch)
        return time_proxy(self.bench, own, kept_share(trial), self.means.effort)

    def _build(self, trial: ProxyKernel, stop: threading.Event) -> Built:
        program, crew = trial.program, self.means.crew
        arch = self.problem.device.arch
        if crew is None:
            cubin = compile_proxy(program, self.emitter, arch, store=self.store, stop=stop)
        else:
            found = crew.call(_compiled, program, self.emitter, arch, self.store, cancel=stop)
            assert isinstance(found, bytes)
            cubin = found
        return Compiled(cubin, trial.program.name, trial.launch)


def proxies_of(problem: Problem, candidates: Sequence[UnrolledPlan], emitter: str) -> list[ProxyKernel]:
    """The proxies of ``candidates`` as they are launched in a language. Raises BadRequest for one that does not fit."""
    return proxies(problem, candidates, LAUNCHES.get(emitter, proxy_launch))


def _compiled(program: KernelProgram, emitter: str, arch: str, store: Store) -> bytes:
    """``compile_proxy`` in another process."""
    return compile_proxy(program, emitter, arch, store=store)


def compile_proxy(
    program: KernelProgram, emitter: str, arch: str, *, store: Store, stop: threading.Event | None = None
) -> bytes:
    """The cubin of a proxy. Raises Unsupported, ToolchainFault, and CancelledError."""
    emission = emit(program, emitter, arch)
    return compile_kernel(emission, arch=arch, registers=program.registers, store=store, workers=1, cancel=stop).cubin


def time_proxy(bench: Bench, built: Compiled, kept: float, effort: Effort = BRIEF) -> Measurement:
    """The time of a proxy's launch over the share of the loads that it ``kept``. Raises GpuFault without a GPU."""
    bench.start()
    shape = Shape(built.launch.grid, built.launch.block, built.launch.shared_bytes)
    try:
        found = bench.request(proxy.COMMAND, Measure(built.cubin, built.entry, shape, False, bench.cache, effort))
    except GpuFault as fault:
        return Measurement(None, None, str(fault))
    assert isinstance(found, Measurement) and found.timing is not None
    timing = found.timing._replace(micros=found.timing.micros / kept)
    return Measurement(timing, None, None, found.clocks)
