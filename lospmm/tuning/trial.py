"""Trials of candidates, the interface of runners that make them, and the fastest of several."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lospmm.families.candidate import Candidate
from lospmm.gpu.messages import Measurement


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate that was timed or failed. ``finals`` are later measurements of the fastest candidates."""

    candidate: Candidate
    measurement: Measurement
    finals: tuple[Measurement, ...] = ()

    @property
    def has_run(self) -> bool:
        """Whether the first measurement succeeded."""
        return self.measurement.timing is not None

    @property
    def micros(self) -> float:
        """Microseconds of the first measurement; infinite if it failed."""
        return _micros(self.measurement)

    @property
    def final_micros(self) -> float | None:
        """Median microseconds of the finals; infinite if one failed, None without finals."""
        micros = [_micros(one) for one in self.finals]
        return (statistics.median(micros) if max(micros) < float("inf") else float("inf")) if micros else None

    @property
    def settled_micros(self) -> float:
        """Microseconds of the finals, or else of the first measurement."""
        return self.micros if self.final_micros is None else self.final_micros


def _micros(measurement: Measurement) -> float:
    return float("inf") if measurement.timing is None else measurement.timing.micros


class Runner(Protocol):
    """Times candidates, by their kernels or proxies on a GPU, or from a log."""

    @property
    def is_over(self) -> bool:
        """Whether time is up for the search."""

    def begin(self, candidates: Sequence[Candidate]) -> None:
        """Start to build ``candidates``, which are timed after those begun before."""

    def trials(self, count: int) -> Iterator[Trial]:
        """Time the next ``count`` candidates begun, once and briefly; fewer once time is up."""

    def again(self, candidates: Sequence[Candidate]) -> Iterator[Measurement]:
        """Time each of ``candidates`` once more and longer; fewer once time is up."""

    def drop(self) -> None:
        """Cancel the builds of candidates that were begun and not timed, and forget them."""


def fastest_first(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that ran, fastest first."""
    return sorted((trial for trial in trials if trial.has_run), key=lambda trial: trial.micros)


def settled(trials: Sequence[Trial]) -> Trial | None:
    """Return the fastest of the trials with the most finals; None if all failed."""
    finalists = [trial for trial in trials if trial.finals] or fastest_first(trials)
    ran = [trial for trial in finalists if trial.settled_micros < float("inf")]
    return min(ran, key=lambda trial: (-len(trial.finals), trial.settled_micros), default=None)


def settled_micros(trials: Sequence[Trial]) -> float:
    """Return the microseconds of ``settled``; infinite if all failed."""
    fastest = settled(trials)
    return float("inf") if fastest is None else fastest.settled_micros


def timed_again(trials: Sequence[Trial], runner: Runner, turns: Sequence[int]) -> list[Trial]:
    """Return ``trials`` with finals of the fastest: turn i times the ``turns[i]`` of least median so far.

    Turns alternate between candidates, so that drift of the GPU affects all alike. A few measurements show which were
    fast by chance; more of them separate the rest (successive halving: Karnin, Koren and Somekh, Almost Optimal
    Exploration in Multi-Armed Bandits, 2013). A turn that is cut short by time does not count, except the first if a
    kernel ran in it.
    """
    trials = list(trials)
    places = sorted((at for at, trial in enumerate(trials) if trial.has_run), key=lambda at: trials[at].micros)
    for count in turns:
        if runner.is_over:
            break
        places = places[:count]
        found: list[Measurement] = []
        for measurement in runner.again([trials[at].candidate for at in places]):
            found.append(measurement)
            if runner.is_over:
                break
        is_first = not any(trial.finals for trial in trials) and any(one.timing for one in found)
        if len(found) < len(places) and not is_first:
            break
        for at, measurement in zip(places, found, strict=False):
            trials[at] = replace(trials[at], finals=(*trials[at].finals, measurement))
        places.sort(key=lambda at: trials[at].settled_micros)
    return trials
