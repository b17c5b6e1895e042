"""What a search has timed, and what it is having timed."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from lospmm.gpu.messages import Measurement
from lospmm.space.candidates import UnrolledPlan

#: What is timed: a candidate, or an entrant of another family.
Item_co = TypeVar("Item_co", covariant=True)

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Scored(Generic[Item_co]):
    candidate: Item_co
    score: float  # the lowest is best: the ranker's, or after the shortlist the forecast in microseconds


@dataclass(frozen=True, slots=True)
class Trial(Generic[Item_co]):
    """A candidate that was timed, or that failed."""

    candidate: Item_co
    score: float
    measurement: Measurement
    finals: tuple[Measurement, ...] = ()  # the times of it, if it was one of the fastest

    @property
    def micros(self) -> float:
        """Infinite for one that failed."""
        return _micros(self.measurement)

    @property
    def final_micros(self) -> float | None:
        """The median of the finals, infinite where one of them failed; None without any."""
        micros = [_micros(one) for one in self.finals]
        return (statistics.median(micros) if max(micros) < float("inf") else float("inf")) if micros else None

    @property
    def settled_micros(self) -> float:
        """The finals', where there are any."""
        return self.micros if self.final_micros is None else self.final_micros


def _micros(measurement: Measurement) -> float:
    return float("inf") if measurement.timing is None else measurement.timing.micros


def fastest_first(timed: Sequence[Trial[Item]]) -> list[Trial[Item]]:
    """Those that ran."""
    return sorted((trial for trial in timed if trial.measurement.timing is not None), key=lambda trial: trial.micros)


@dataclass(slots=True)
class Batch:
    """Candidates that are built and timed, one after the other as they are asked for."""

    asked: Sequence[Scored[UnrolledPlan]]
    measurements: Iterator[Measurement]

    def timed(self, is_over: Callable[[], bool], *, first: bool) -> Iterator[Trial[UnrolledPlan]]:
        for scored, measurement in zip(self.asked, self.measurements, strict=False):
            yield Trial(scored.candidate, scored.score, measurement)
            first = first and measurement.timing is None
            if not first and is_over():
                return

    def start(self) -> None:
        """Have the first timed while something else is done, where that can be."""
        if isinstance(self.measurements, Startable):
            self.measurements.start()

    def close(self) -> None:
        """Nothing more is built."""
        if isinstance(self.measurements, Closeable):
            self.measurements.close()


@runtime_checkable
class Startable(Protocol):
    def start(self) -> None: ...


@runtime_checkable
class Closeable(Protocol):
    def close(self) -> None: ...


#: Where the fastest of so many takes so many times what a rival takes, a search ends. A rival is known of half a
#: million nonzeros or more: of these no unrolled kernel was faster than the fastest of the first ten by more than 16 %
#: (``benchmarks.skipping``).
ENOUGH, LOST = 10, 1.2

#: Builds and times candidates, in their order; fewer than it was given where time is up.
Trials = Callable[[Sequence[Any]], Iterable[Measurement]]


@dataclass(frozen=True, slots=True)
class Clock:
    """``trials`` times each candidate once and briefly, ``finals`` the fastest, ``is_over`` says when to stop.
    ``rival_micros`` is what a kernel of another family was found to take."""

    trials: Trials
    finals: Trials | None = None  # None: nothing is timed again
    is_over: Callable[[], bool] = lambda: False
    rival_micros: float = float("inf")

    def is_lost(self, ran: int, fastest_micros: float) -> bool:
        """Whether the rival is faster than all that a search will find, of which so many ``ran``."""
        return ran >= ENOUGH and fastest_micros > LOST * self.rival_micros
