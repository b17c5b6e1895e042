"""The search, from a problem to the candidate that is built: the one place that knows the order of the steps.

space -> constraints -> schedules -> ranker -> shortlist -> trials -> finals -> choice

Without a GPU the choice is the ranker's first. With one the shortlist is timed, and then what promises most after what
was timed so far, and then some of tile sizes of their own (``space_axes``). The fastest few are timed again, in turns.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import NothingFits
from lospmm.problem.problem import Problem
from lospmm.space.axes import doubled
from lospmm.space.candidates import Tiling, UnrolledPlan, UnrolledPlans
from lospmm.space.estimate import estimate_micros
from lospmm.space.explore import Space, explore, widen
from lospmm.space.ranker import Ranker, shortlist
from lospmm.space.reorder import regroup, threads_for
from lospmm.stages import Stages
from lospmm.tuning.trial import Scored, Trial


@dataclass(frozen=True, slots=True)
class Policy:
    """How far a search by time goes. Times of one kernel differ by several percent, so that the fastest is not always
    the one that stays the fastest: of some, what ran before decides (docs/measuring.md)."""

    rounds: int = 14  # how often what promises most is timed,
    batch: int = 6  # and how many candidates each time
    ahead: int = 2  # rounds that are built while another is timed; the shortlist is timed in one part more
    finals: tuple[int, ...] = (8, 6, 4, 3, 2)  # of the fastest, how many are timed again in each turn
    walked: int = 4  # that walk their code twice, timed behind the rounds
    doubled: int = 9  # with two words to a thread, timed after the rounds,
    doubled_rounds: int = 8  # and rounds of such, where the fastest is near the fastest of all


POLICY = Policy()

#: Candidates of two words to a thread are not looked at whose best estimate is so many times that of the others; and no
#: more of them are timed once the fastest of the first took so many times the fastest of the others.
DOUBLES_WORTH = 1.5

DOUBLES_NEAR = 1.2

#: Without a clock they are chosen where their best estimate is so many times that of the others, or less: over 77
#: problems that were timed on an H200, near ties went to the others more often than not.
DOUBLES_SURE = 0.93


@dataclass(frozen=True, slots=True)
class Choice:
    """The winner and everything that led to it."""

    winner: UnrolledPlan
    space: Space
    shortlist: tuple[Scored[UnrolledPlan], ...]  # best first
    doubles: tuple[Scored[UnrolledPlan], ...] = ()  # the same of two words to a thread, by the estimate
    trials: tuple[Trial[UnrolledPlan], ...] = ()  # in the order in which they were timed
    forecast_micros: float | None = None  # what the winner takes by a model of such choices; None: by the estimate

    @property
    def listed(self) -> Sequence[Scored[UnrolledPlan]]:
        """The shortlist, behind a winner that is not of it."""
        return (*(one for one in self.doubles if one.candidate is self.winner), *self.shortlist)

    @property
    def micros(self) -> float:
        """What the winner took; infinite where nothing was timed."""
        return next((one.settled_micros for one in self.trials if one.candidate is self.winner), float("inf"))


def search(
    problem: Problem,
    ranker: Ranker,
    shortlist_size: int,
    stages: Stages,
    *,
    lockstep: int = 0,
    splits: tuple[int, ...] = (1,),
) -> Choice:
    """Choose without measuring: the candidate that ``ranker`` puts first, or one of two words to a thread that is
    estimated to be faster. Raises NothingFits."""
    return search_space(
        problem, explore_problem(problem, stages, splits=splits), ranker, shortlist_size, stages, lockstep=lockstep
    )


def search_space(
    problem: Problem, space: Space, ranker: Ranker, shortlist_size: int, stages: Stages, *, lockstep: int = 0
) -> Choice:
    """The same in a space that was explored."""
    if not space.survivors:
        raise NothingFits(_refusals(problem, space))
    with stages.stage("constraints"):
        candidates = widen(problem, space, lockstep)
    with stages.stage("rank"):
        scores = ranker(problem, candidates)
        best = _listed(candidates, scores, shortlist_size)
        wide = doubled(problem, space).with_axis("lockstep", lockstep)
        found: list[Scored[UnrolledPlan]] = []
        winner = best[0].candidate
        if len(wide):
            estimates = estimate_micros(problem, candidates)
            found = _listed(wide, estimate_micros(problem, wide), shortlist_size)
            if found[0].score > DOUBLES_WORTH * estimates.min():
                found = []
            elif found[0].score <= DOUBLES_SURE * estimates.min():
                winner = found[0].candidate
    return Choice(winner, space, tuple(best), tuple(found))


def _listed(candidates: UnrolledPlans, scores: NDArray[np.float64], size: int) -> list[Scored[UnrolledPlan]]:
    """Those of the lowest scores: as many tiles of as many columns differ little in time, whatever a tile's rows."""
    tiles = candidates.by_tiling(lambda tiling: len(tiling.tiles))
    kinds = np.stack((tiles, candidates.cols, candidates.split_k), axis=1)
    chosen = shortlist(scores, size, kinds, candidates.split_k)
    return [Scored(candidates[at], float(scores[at])) for at in chosen]


def spread_over(shortlist: Sequence[Scored[UnrolledPlan]], locksteps: Sequence[int]) -> list[Scored[UnrolledPlan]]:
    """The shortlist with every lockstep in turn, which the estimate does not tell from each other."""
    spread = []
    for place, scored in enumerate(shortlist):
        candidate, lockstep = scored.candidate, locksteps[place % len(locksteps)]
        if candidate.schedule.lockstep != lockstep:
            candidate = replace(candidate, schedule=replace(candidate.schedule, lockstep=lockstep))
        spread.append(replace(scored, candidate=candidate))
    return spread


def explore_problem(problem: Problem, stages: Stages, *, splits: tuple[int, ...] = (1,)) -> Space:
    """The space and its constraints, with rows regrouped by Algorithm 1."""

    def timed_regroup(size_limits: Sequence[int]) -> dict[int, Tiling]:
        with stages.stage("reorder"):
            return regroup(problem.matrix, size_limits, workers=threads_for(problem.matrix))

    with stages.stage("constraints"):
        return explore(problem, timed_regroup, splits=splits)


def _refusals(problem: Problem, space: Space) -> str:
    counts = Counter(verdict.constraint for verdict in space.verdicts)
    refused = ", ".join(f"{count} by {name}" for name, count in counts.items())
    return f"no tile size fits {problem.device.name}: of {space.size}, {refused}"
