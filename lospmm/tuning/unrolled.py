"""The search for unrolled candidates without a GPU: explore, constrain, regroup, rank (section 3)."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import NothingFits
from lospmm.families.candidate import Candidate, unrolled
from lospmm.problem.problem import Problem
from lospmm.space.axes import wide_plans
from lospmm.space.candidates import Tiling, UnrolledPlans
from lospmm.space.estimate import estimate_micros
from lospmm.space.explore import Space, explore, widen
from lospmm.space.ranker import Ranker, shortlist
from lospmm.space.reorder import THREADED_CELLS, regroup, threads_for
from lospmm.stages import Stages
from lospmm.tuning.known import Choice

#: Candidates with two words per thread are listed if their best estimate is at most this times that of the others.
WIDE_WORTH = 1.5

#: Ratio of the tiles, or of the columns, of two candidates that are listed early. Of 171 problems timed on an H200, the
#: best of the estimate's first five lost 5.5 %, and 6.5 % with one of each number of tiles and columns.
APART = 2**0.5

#: If nothing is timed they win if their best estimate is at most this times that of the others. It is below 1 since the
#: others won most near ties, over 77 problems timed on an H200.
WIDE_SURE = 0.93


def search(
    problem: Problem, ranker: Ranker, shortlist_size: int, stages: Stages, *, splits: tuple[int, ...] = (1,)
) -> Choice:
    """Return the candidates that ``ranker`` predicts fastest, with a winner for use without timing.

    The winner may have two words per thread, which the estimate ranks. ``problem`` is in words (``lanes.in_lanes``).
    Raises NothingFits.
    """
    return search_space(problem, explore_problem(problem, stages, splits=splits), ranker, shortlist_size, stages)


def explore_problem(problem: Problem, stages: Stages, *, splits: tuple[int, ...] = (1,)) -> Space:
    """Return the space after all constraints, with rows regrouped by Algorithm 1."""

    def timed_regroup(size_limits: Sequence[int]) -> dict[int, Tiling]:
        if problem.matrix.m * problem.matrix.k >= THREADED_CELLS:  # seconds, of which a log shows the beginning too
            stages.progress("reorder", 0, len(size_limits))
        with stages.stage("reorder"):
            return regroup(problem.matrix, size_limits, workers=threads_for(problem.matrix))

    with stages.stage("constraints"):
        return explore(problem, timed_regroup, splits=splits)


def search_space(problem: Problem, space: Space, ranker: Ranker, shortlist_size: int, stages: Stages) -> Choice:
    """Choose as ``search``, in an explored space. Raises NothingFits."""
    if not space.survivors:
        raise NothingFits(_refusals(problem, space))
    with stages.stage("constraints"):
        candidates = widen(problem, space)
    with stages.stage("rank"):
        best = _listed(candidates, ranker(problem, candidates), shortlist_size)
        winner, found = best[0], list[Candidate]()
        wide = wide_plans(problem, space)
        if len(wide):
            least = estimate_micros(problem, candidates).min()
            found = _listed(wide, estimate_micros(problem, wide), shortlist_size)
            if found[0].score > WIDE_WORTH * least:
                found = []
            elif found[0].score <= WIDE_SURE * least:
                winner = found[0]
    return Choice(winner, space, tuple(best), tuple(found))


def _listed(candidates: UnrolledPlans, scores: NDArray[np.float64], size: int) -> list[Candidate]:
    """Return the candidates of the lowest scores, one of each kind.

    Candidates with as many tiles, columns and blocks per tile are of a kind: their times differ little. Those whose
    tiles and columns differ by less than APART come after all others: a forecast that is wrong of one is wrong of all.
    """
    tiles = candidates.by_tiling(lambda tiling: tiling.count)
    sizes = np.stack((np.maximum(tiles, 1), candidates.cols))
    steps = np.rint(np.log(sizes) / np.log(APART)).astype(np.int64)
    kinds = [np.stack((*axes, candidates.split_k), axis=1) for axes in (steps, sizes)]
    chosen = shortlist(scores, size, kinds, candidates.split_k)
    return [unrolled(candidates[at], float(scores[at])) for at in chosen]


def _refusals(problem: Problem, space: Space) -> str:
    counts = Counter(verdict.constraint for verdict in space.verdicts)
    refused = ", ".join(f"{count} by {name}" for name, count in counts.items())
    return f"no tile size fits {problem.device.name}: of {space.size}, {refused}"
