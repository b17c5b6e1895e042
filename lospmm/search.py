"""The search, from a problem to the candidate that is built: the one place that knows the order of the steps.

space -> constraints -> schedules -> ranker -> shortlist -> choice
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lospmm.errors import NothingFits
from lospmm.model import Candidate, Problem, Tiling
from lospmm.ranker import Ranker, shortlist
from lospmm.reorder import regroup
from lospmm.space import Space, explore, widen
from lospmm.stages import Stages


@dataclass(frozen=True, slots=True)
class Scored:
    candidate: Candidate
    score: float  # the ranker's: the lowest is best


@dataclass(frozen=True, slots=True)
class Choice:
    """The winner and everything that led to it."""

    winner: Candidate
    space: Space
    shortlist: tuple[Scored, ...]  # best first


def search(problem: Problem, ranker: Ranker, shortlist_size: int, stages: Stages, *, workers: int = 1) -> Choice:
    """Choose without measuring: the candidate that ``ranker`` puts first. Raises NothingFits."""
    space = explore_problem(problem, stages, workers=workers)
    if not space.survivors:
        raise NothingFits(_refusals(problem, space))
    with stages.stage("constraints"):
        candidates = [wider for survivor in space.survivors for wider in widen(problem, survivor)]
    with stages.stage("rank"):
        scores = ranker(problem, candidates)
        best = [Scored(candidates[index], float(scores[index])) for index in shortlist(scores, shortlist_size)]
    return Choice(best[0].candidate, space, tuple(best))


def explore_problem(problem: Problem, stages: Stages, *, workers: int = 1) -> Space:
    """The space and its constraints, with rows regrouped by Algorithm 1."""

    def timed_regroup(size_limits: Sequence[int]) -> dict[int, Tiling]:
        with stages.stage("reorder"):
            return regroup(problem.matrix, size_limits, workers=workers)

    with stages.stage("constraints"):
        return explore(problem, timed_regroup)


def _refusals(problem: Problem, space: Space) -> str:
    counts = Counter(verdict.constraint for verdict in space.verdicts)
    refused = ", ".join(f"{count} by {name}" for name, count in counts.items())
    return f"no tile size fits {problem.device.name}: of {space.size}, {refused}"
