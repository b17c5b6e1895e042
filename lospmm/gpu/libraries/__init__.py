"""The libraries that a kernel is compared with, in the same run.

``BASELINES`` has a row for each. To add one, write a function of a ``LibraryTask`` that yields the ``Variants`` of
its library, ready to be put on the stream, and add a row. Its result goes through the kernels' gate, which compares it
with the product of the matrix that the library multiplies; a missing or failing library is a value, the reason of a
``BaselineTime``, and never ends the comparison.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from lospmm.gpu.gate import GateVerdict
from lospmm.gpu.libraries import cublas, cusparse, cusparselt, eight_bits, sputnik
from lospmm.gpu.libraries.library import Enqueue, LibraryFault, LibraryTask, Variants
from lospmm.gpu.timing import Timing
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.accuracy import SUM_ROUNDING, off_by
from lospmm.problem.dtype import DTYPES, Dtype
from lospmm.problem.values import ValueType

#: TF32 keeps 10 of 23 fraction bits of A and B (PTX ISA, "Alternate floating-point data formats"). If the rest is
#: truncated, a product is off by at most 2 x 2^-10 of itself; 0.0005 more is for the sum.
MAX_TF32_ERROR = 2.5e-3

#: In 16-bit types a library may round partial sums to the type, as cuBLAS does where it splits K: some unit roundoffs,
#: relative to |A| |B|. The limit of kernels is lower (``lospmm.problem.accuracy``).
MAX_ROUNDOFFS_OF_16_BIT = 4.0

_FLOAT32 = ("float32", "tf32")  # as they lie in memory
_16_BIT = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Baseline:
    """A library's product that a kernel is compared with."""

    title: str  # in a table
    prepare: Callable[[LibraryTask], AbstractContextManager[Variants]]
    dtypes: tuple[str, ...] = _FLOAT32  # of problems that it is a baseline of
    max_relative_error: float | None = None  # to |A| |B|; None: the limit of kernels (``lospmm.cpu.verify``)
    values: str | None = None  # only of problems with A stored in this 8-bit type

    def limit(self, dtype: Dtype) -> float | None:
        """Return the largest error relative to |A| |B|; None: that of the kernels."""
        return MAX_ROUNDOFFS_OF_16_BIT * dtype.unit_roundoff if dtype.is_16_bit else self.max_relative_error


BASELINES: Mapping[str, Baseline] = MappingProxyType(
    {
        "cusparse": Baseline("cuSPARSE", cusparse.prepare, tuple(DTYPES)),
        "cublas_fp32": Baseline("cuBLAS fp32, dense", partial(cublas.prepare, name="fp32")),
        "cublas_tf32": Baseline(
            "cuBLAS TF32, dense",
            partial(cublas.prepare, compute=cublas.COMPUTE_32F_FAST_TF32, name="TF32"),
            max_relative_error=MAX_TF32_ERROR,
        ),
        "cublas_fp16": Baseline("cuBLAS fp16, dense", partial(cublas.prepare, name="fp16"), ("float16",)),
        "cublas_bf16": Baseline("cuBLAS bf16, dense", partial(cublas.prepare, name="bf16"), ("bfloat16",)),
        "cusparselt_fp16": Baseline("cuSPARSELt fp16, 2:4", cusparselt.prepare, ("float16",)),
        "cusparselt_bf16": Baseline("cuSPARSELt bf16, 2:4", cusparselt.prepare, ("bfloat16",)),
        "cublas_int8": Baseline(
            "cuBLASLt int8, dense", partial(eight_bits.prepare, values="int8"), _16_BIT, values="int8"
        ),
        "cublas_fp8": Baseline(
            "cuBLASLt fp8, dense", partial(eight_bits.prepare, values="fp8_e4m3"), _16_BIT, values="fp8_e4m3"
        ),
        "sputnik": Baseline("Sputnik", sputnik.prepare),
    }
)

#: Baselines with a dense A, of the same product.
DENSE = ("cublas_fp32", "cublas_tf32", "cublas_fp16", "cublas_bf16")

#: The dense baseline of each type, by name.
DENSE_OF: Mapping[str, str] = MappingProxyType(
    dict(zip(("float32", "tf32", "float16", "bfloat16"), DENSE, strict=True))
)


def baselines_of(dtype: Dtype, values: ValueType | None = None) -> tuple[str, ...]:
    """Return the names of those that compute in this type, or take its B and C unchanged, or A's ``values``."""
    taken = (None,) if values is None else (None, values.name)
    return tuple(name for name, one in BASELINES.items() if dtype.name in one.dtypes and one.values in taken)


@dataclass(frozen=True, slots=True)
class VariantTime:
    """One way in which a library computes C. ``timing`` is None exactly if there is a ``failure``."""

    name: str
    timing: Timing | None
    max_relative_error: float | None  # None where nothing was computed, or no numbers
    failure: str | None

    @property
    def micros(self) -> float:
        """Microseconds; infinite without a timing."""
        return math.inf if self.timing is None else self.timing.micros


@dataclass(frozen=True, slots=True)
class BaselineTime:
    """A row of ``BASELINES`` on one problem. ``failure`` says why there is no ``best``."""

    name: str
    library: str | None  # its name, version and file; None where it is missing
    variants: tuple[VariantTime, ...]
    failure: str | None

    @property
    def best(self) -> VariantTime | None:
        """The fastest variant that was timed."""
        fastest = min(self.variants, key=lambda variant: variant.micros, default=None)
        return None if fastest is None or fastest.timing is None else fastest

    @property
    def micros(self) -> float | None:
        """The time of the fastest variant."""
        return None if self.best is None else self.best.micros

    def micros_of(self, variant: str) -> float | None:
        """Return the time of a variant; None if it was not timed."""
        timings = (way.timing for way in self.variants if way.name == variant)
        return next((timing.micros for timing in timings if timing is not None), None)


#: Runs an enqueue on a C full of NaN and checks it within a limit (None: that of kernels); a matrix replaces A.
Check = Callable[[Enqueue, float | None, SparseMatrix | None], GateVerdict]


def time_baseline(name: str, place: LibraryTask, *, check: Check, time: Callable[[Enqueue], Timing]) -> BaselineTime:
    """Check and time a library on the problem of ``place``; ``time`` is the clock.

    Raises GpuFault where the GPU fails, after which nothing may work any more in this process.
    """
    baseline = BASELINES[name]
    limit = baseline.limit(place.dtype)
    try:
        with baseline.prepare(place) as variants:
            check = check if variants.error_of is None else partial(_check, variants.error_of)
            place.driver.synchronize()
            try:
                timed = tuple(
                    _time_variant(way, enqueue, partial(check, enqueue, limit, variants.multiplied), time)
                    for way, enqueue in variants.enqueue.items()
                )
            finally:  # what is on the stream still reads what the library's end frees
                place.driver.synchronize()
    except LibraryFault as fault:
        return BaselineTime(name, None, (), str(fault))
    failures = None if any(way.timing for way in timed) else "; ".join(f"{way.name}: {way.failure}" for way in timed)
    return BaselineTime(name, variants.library, timed, failures)


def _check(
    error_of: Callable[[Enqueue], float], enqueue: Enqueue, limit: float | None, _: SparseMatrix | None
) -> GateVerdict:
    error, most = error_of(enqueue), SUM_ROUNDING if limit is None else limit
    return GateVerdict(error, None if error <= most else off_by(error, 1.0, most))


def _time_variant(
    name: str, enqueue: Enqueue, check: Callable[[], GateVerdict], time: Callable[[Enqueue], Timing]
) -> VariantTime:
    try:
        verdict = check()
        error = verdict.max_relative_error
        timing = time(enqueue) if verdict.failure is None else None
        return VariantTime(name, timing, error if error is None or math.isfinite(error) else None, verdict.failure)
    except LibraryFault as fault:
        return VariantTime(name, None, None, str(fault))
