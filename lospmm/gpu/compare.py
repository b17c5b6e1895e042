"""Comparison of a kernel with libraries that compute the same, in one run on one GPU, and a roofline.

``compare`` needs only a live ``Bench``, so a search that has one can call it for its winner; ``cli.bench`` opens
one for an artifact. docs/benchmarking.md says how times are taken and how reliable they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from lospmm.artifact.manifest import Measured
from lospmm.errors import GpuFault, VerificationFailed
from lospmm.gpu.bench import Bench
from lospmm.gpu.libraries import BASELINES, DENSE, BaselineTime, baselines_of
from lospmm.gpu.libraries.work import COMMAND, BaselineTask
from lospmm.gpu.messages import CacheState, Measurement
from lospmm.gpu.operands import copies_in_turn
from lospmm.gpu.timing import FULL, Effort, Timing
from lospmm.problem.device import Clocks, DeviceSpec
from lospmm.problem.dtype import Dtype
from lospmm.problem.problem import Problem
from lospmm.stages import Progress, silent
from lospmm.toolchain.compile import Built


class Roofline(NamedTuple):
    """The least time that a GPU's published peaks allow, in microseconds, and which of them it is."""

    micros: float
    by: Literal["arithmetic", "memory"]


def bound(problem: Problem) -> Roofline:
    """Return the larger of 2 nnz n / peak rate and s n (k + m) / bandwidth; s: bytes of an element.

    B, or a convolution's input, and any residual are read once, and C is written once. The rate is that of tensor cores
    if the GPU has some for the type. The bytes of A do not count. A B in the L2 cache may be read faster.
    """
    matrix, device = problem.matrix, problem.device
    arithmetic = 2 * matrix.nnz * problem.n / peak_flops(device, problem.dtype) * 1e6
    c_elements = matrix.m * problem.n * (2 if problem.epilogue.residual else 1)
    memory = problem.dtype.element_bytes * (problem.b_elements + c_elements) / device.memory_bandwidth * 1e6
    return Roofline(arithmetic, "arithmetic") if arithmetic > memory else Roofline(memory, "memory")


def peak_flops(device: DeviceSpec, dtype: Dtype) -> float:
    """Return the peak rate of multiply-adds of a type with fp32 sums, two operations each, per second."""
    rates = {"tf32": device.tf32_flops, "float16": device.fp16_flops, "bfloat16": device.bf16_flops}
    return max(device.peak_flops, rates.get(dtype.name, 0.0))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Times of one run; ``noise`` is the kernel's longest minus shortest time, over the shortest."""

    gpu: str
    cache: CacheState
    copies: int  # of B and C, through which the launches rotated
    timing: Timing  # of the kernel
    max_relative_error: float  # over all of its C
    noise: float
    bound: Roofline
    baselines: Mapping[str, BaselineTime]
    clocks: Clocks | None
    driver: str = ""  # its version, where it is known

    @property
    def micros(self) -> float:
        """The time of the kernel."""
        return self.timing.micros

    @property
    def faster_dense(self) -> tuple[str, ...]:
        """The dense baselines that are faster than the kernel, the fastest first: there pruning gains no time."""
        times = {name: self._micros(name) for name in DENSE}
        faster = {name: micros for name, micros in times.items() if micros is not None and micros < self.micros}
        return tuple(sorted(faster, key=faster.__getitem__))

    @property
    def advice(self) -> Literal["sparse", "dense"]:
        """The faster choice: the sparse kernel or a dense library."""
        return "dense" if self.faster_dense else "sparse"

    def measured(self) -> Measured:
        """Return the comparison as the manifest keeps it."""
        cusparse = self.baselines.get("cusparse")
        return Measured(
            micros=self.micros,
            spread=self.timing.spread,
            noise=self.noise,
            cold=self.cache == "cold",
            cache=self.cache,
            bound_micros=self.bound.micros,
            cusparse_algorithm=self._best("cusparse"),
            cusparse_alg2_micros=None if cusparse is None else cusparse.micros_of("CSR_ALG2"),
            cusparselt_weights=self._best("cusparselt_fp16") or self._best("cusparselt_bf16"),
            advice=self.advice,
            gpu=self.gpu,
            driver=self.driver or None,
            clocks=self.clocks,
            **{f"{name}_micros": self._micros(name) for name in BASELINES},
        )

    def _micros(self, name: str) -> float | None:
        return self.baselines[name].micros if name in self.baselines else None

    def _best(self, name: str) -> str | None:
        """Return the name of a library's fastest variant."""
        best = self.baselines[name].best if name in self.baselines else None
        return None if best is None else best.name


def compare(
    bench: Bench,
    kernel: Built,
    *,
    effort: Effort = FULL,
    names: Sequence[str] = tuple(BASELINES),
    known: Mapping[str, BaselineTime] = MappingProxyType({}),
    sputnik: Path | None = None,
    is_searched: bool = False,
    before: Measurement | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Time the kernel before, among and after the baselines of these names, in the worker of ``bench``.

    ``effort`` is that of every timing. Baselines that are ``known``, by name, are not timed again; those that do not
    take the problem's type are left out. ``is_searched``: time a library's other algorithms too. ``before`` is a
    measurement that counts as the kernel's first, so that it is timed once more, not three times. No baseline takes a
    convolution, and none computes an epilogue.

    The kernel is loaded anew for each of its timings, as its time depends on what ran before. Their median is its
    time; their range is the noise, which also shows a change of clocks. A baseline that fails has no time. Raises
    GpuFault and VerificationFailed for the kernel itself, ToolchainFault and CancelledError as ``Bench.measure`` does.
    """
    taken = () if bench.problem.convolution is not None else baselines_of(bench.problem.dtype, bench.problem.values)
    names = [name for name in names if name in taken]
    half = len(names) // 2
    ends = [] if before else [None]
    turns = [*ends, *names[:half], None, *names[half:], *ends]  # None: the kernel itself
    timed = [_found(kernel, before)] if before else []
    baselines: dict[str, BaselineTime] = {}
    for done, name in enumerate(turns):
        progress("compare", done, len(turns))
        if name is None:
            measured = bench.measure(kernel.cubin, kernel.entry, kernel.launch, effort=effort)
            timed.append(_found(kernel, measured))
        elif name in known:
            baselines[name] = known[name]
        else:
            baselines[name] = _time_baseline(bench, BaselineTask(name, bench.cache, sputnik, effort, is_searched))
    progress("compare", 1, 1)
    timings = sorted(timing for timing, _, _ in timed)
    ready = bench.start()
    return Comparison(
        gpu=ready.device,
        driver=ready.release,
        cache=bench.cache,
        copies=copies_in_turn(bench.cache, ready.copies),
        timing=timings[len(timings) // 2],
        max_relative_error=max(error for _, error, _ in timed),
        noise=timings[-1].micros / timings[0].micros - 1,
        bound=bound(bench.problem),
        baselines=baselines,
        clocks=timed[-1][2],
    )


def _time_baseline(bench: Bench, task: BaselineTask) -> BaselineTime:
    try:
        answer = bench.request(COMMAND, task)
    except GpuFault as fault:
        answer = BaselineTime(task.name, None, (), str(fault))
    assert isinstance(answer, BaselineTime)
    return answer


def _found(kernel: Built, measured: Measurement) -> tuple[Timing, float, Clocks | None]:
    """Return the kernel's time, its error and the clocks."""
    if measured.timing is None:
        kind = GpuFault if measured.max_relative_error is None else VerificationFailed
        raise kind(f"{kernel.entry}: {measured.failure}")
    assert measured.max_relative_error is not None
    return measured.timing, measured.max_relative_error, measured.clocks
