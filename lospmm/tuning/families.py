"""The families beside the unrolled one, in the same tuning: what each would try, timed, and the fastest of all.

A family names all its plans and says by a forecast which to try first. The first of every family that is not forecast
to be far behind are timed, as equals; then the neighbours of the fastest, plans that differ from it in one field, until
none of them is faster. Without a clock the forecast decides.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.families import FAMILIES, Candidate
from lospmm.problem.problem import Problem
from lospmm.tuning.finals import settled
from lospmm.tuning.trial import Trial, fastest_first

#: A family is timed where its forecast is at most so many times the time of a kernel that it has to beat: of those that
#: were measured on an H200, at most 7 % were forecast to take more than that times what they took. Where there is none
#: to beat, so many times the best forecast, which may be too low itself.
PROMISING, PROMISING_UNTIMED = 1.5, 3.0

#: Of each family, what is timed before the neighbours of the fastest; and neighbours at most, of a round.
FIRST, NEIGHBOURS = 4, 6


@dataclass(frozen=True, slots=True)
class FamilyPlans:
    """Who takes part: ``entrants`` in the order of their forecast, and why others do not, by family."""

    entrants: tuple[Candidate, ...]
    refusals: Mapping[str, str]
    dense_micros: float | None = None  # what the vendor's dense multiplication is forecast to take
    unrolled_micros: float | None = None  # and the fastest unrolled kernel, where others are timed before these

    def of(self, family: str) -> tuple[Candidate, ...]:
        return tuple(one for one in self.entrants if one.family == family)


@dataclass(frozen=True, slots=True)
class FamilyTrials:
    """``timed`` in the order in which it was; empty without a clock."""

    field: FamilyPlans
    timed: tuple[Trial[Candidate], ...] = ()

    @property
    def best(self) -> Candidate | None:
        """The fastest of those that were timed again, or by forecast where nothing was timed; None: nobody ran."""
        if not self.timed:
            return self.field.entrants[0] if self.field.entrants else None
        trial = self.fastest
        return None if trial is None else trial.candidate

    @property
    def fastest(self) -> Trial[Candidate] | None:
        return settled(self.timed) if fastest_first(self.timed) else None

    @property
    def fastest_micros(self) -> float:
        """Infinite where nobody ran."""
        return float("inf") if self.fastest is None else self.fastest.settled_micros


#: Corrects the forecasts, (plans,), of a family's plans.
Correct = Callable[[str, Sequence[Any], NDArray[np.float64]], NDArray[np.float64]]


def family_plans(
    problem: Problem,
    names: Collection[str],
    correct: Correct = lambda _family, _plans, micros: micros,
    *,
    dense_micros: float | None = None,
) -> FamilyPlans:
    """All plans of the families ``names``, the best forecast first."""
    entrants: list[Candidate] = []
    refusals: dict[str, str] = {}
    for name in names:
        family = FAMILIES[name]
        plans = () if (why := family.refusal(problem)) is not None else family.plans(problem)
        if not plans:
            refusals[name] = why or "no plan fits"
            continue
        micros = correct(name, plans, family.forecast(problem, plans))
        entrants += [Candidate(name, plan, float(one)) for plan, one in zip(plans, micros, strict=True)]
    in_order = tuple(sorted(entrants, key=lambda one: one.forecast_micros))
    return FamilyPlans(in_order, refusals, dense_micros)  # no proxy: other processes send it


def _first(field: FamilyPlans, limit_micros: float) -> list[Candidate]:
    """The best of each family that may win, those of all families by turns."""
    if not field.entrants:
        return []
    limit = min(PROMISING * limit_micros, PROMISING_UNTIMED * field.entrants[0].forecast_micros)
    names = dict.fromkeys(one.family for one in field.entrants)
    best_first = [field.of(name) for name in names]
    queues = [_spread(entrants) for entrants in best_first if entrants[0].forecast_micros <= limit]
    return [queue[at] for at in range(FIRST) for queue in queues if at < len(queue)]


def _spread(entrants: Sequence[Candidate]) -> list[Candidate]:
    """FIRST of them: the best, then those that differ from all before in two fields or more, then the others."""
    taken: list[Candidate] = []
    for one in entrants:
        if len(taken) < FIRST and all(_distance(one, other) > 1 for other in taken):
            taken.append(one)
    return [*taken, *(one for one in entrants if one not in taken)][:FIRST]


def _distance(one: Candidate, other: Candidate) -> int:
    """Fields in which two plans of a family differ."""
    left, right = asdict(one.plan), asdict(other.plan)
    return sum(left[name] != right.get(name) for name in left)


def _neighbours(field: FamilyPlans, best: Candidate, asked: Collection[object]) -> list[Candidate]:
    return [one for one in field.of(best.family) if _key(one) not in asked and _distance(one, best) == 1]


def _key(entrant: Candidate) -> tuple[str, object]:
    return entrant.family, entrant.plan
