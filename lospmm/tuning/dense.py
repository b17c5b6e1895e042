"""The family "dense": leaving a product to the vendor's dense multiplication, if that is faster.

The tuner never chooses a kernel that is slower than cuBLAS of the same type. The artifact holds a kernel all the same,
for programs that do not call cuBLAS.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lospmm.artifact.manifest import DenseSummary
from lospmm.gpu.libraries import BASELINES, DENSE_OF, BaselineTime, VariantTime
from lospmm.gpu.libraries.dense import refusal
from lospmm.problem.accuracy import ACCURACY, Accuracy
from lospmm.problem.dtype import Dtype
from lospmm.problem.problem import Problem


@dataclass(frozen=True, slots=True)
class DenseChoice:
    """Dense multiplication compared with the fastest kernel, in microseconds.

    Both were timed in one run; if ``time`` is None, both are forecasts. ``why_not`` says in a few words why dense
    multiplication cannot be chosen.
    """

    forecast_micros: float
    time: BaselineTime | None = None
    kernel_micros: float = 0.0
    why_not: str | None = None

    @property
    def best(self) -> VariantTime | None:
        """The library's fastest variant; None if none was timed."""
        return None if self.time is None else self.time.best

    @property
    def micros(self) -> float | None:
        """The library's measured microseconds; None if it was not timed."""
        return None if self.time is None else self.time.micros

    @property
    def is_chosen(self) -> bool:
        """Whether dense multiplication is possible and faster than the kernel."""
        micros = self.forecast_micros if self.micros is None else self.micros
        return self.why_not is None and micros < self.kernel_micros

    def in_manifest(self) -> DenseSummary | None:
        """Return the manifest's summary; None if dense multiplication is not chosen."""
        if not self.is_chosen:
            return None
        return DenseSummary(
            library=None if self.time is None else self.time.library,
            micros=self.micros,
            max_relative_error=None if self.best is None else self.best.max_relative_error,
            forecast_micros=self.forecast_micros,
        )

    def log_line(self, rank: int) -> dict[str, object]:
        """Return the line of ``tuning.jsonl``: the fields of a trial's line, and ``kernel_micros``."""
        best = self.best
        timing = None if best is None else best.timing
        return {
            "rank": rank,
            "family": "dense",
            "score": self.forecast_micros,
            "estimated_micros": self.forecast_micros,
            "measured_micros": self.micros,
            "spread": None if timing is None else timing.spread,
            "max_relative_error": None if best is None else best.max_relative_error,
            "failure": self.why_not,
            "final_micros": [],
            "kernel_micros": self.kernel_micros,
        }


def dense_choice(
    problem: Problem, forecast_micros: float, times: Mapping[str, BaselineTime], *, kernel_micros: float
) -> DenseChoice:
    """Return the comparison with a kernel of ``kernel_micros``.

    ``forecast_micros`` is the forecast of dense multiplication; ``times`` are the libraries' times, by name.
    """
    if (why := refusal(problem)) is not None:
        return DenseChoice(forecast_micros, why_not=why)
    time = times.get(DENSE_OF[problem.dtype.name])
    failure = None if time is None or time.micros is not None else time.failure or "failed"
    return DenseChoice(forecast_micros, time, kernel_micros, failure)


def left_to_cublas(manifest: Mapping[str, Any]) -> str | None:
    """Return why a layer of PyTorch, which can call cuBLAS, need not be timed; None if it must be timed."""
    dense, measured = manifest["dense"], manifest["measured"]
    if dense is None or dense["micros"] is None or measured is None:
        return None
    return f"cuBLAS is faster than its kernel: {dense['micros']:.1f} of {measured['micros']:.1f} us"


def accuracy_of_dense(dtype: Dtype) -> Accuracy:
    """Return the accuracy required of cuBLAS in a type: it may round sums more than kernels may."""
    limit = BASELINES[DENSE_OF[dtype.name]].limit(dtype)
    accuracy = ACCURACY[dtype.name]
    return accuracy if limit is None else replace(accuracy, sum_rounding=limit)
