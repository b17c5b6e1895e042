"""Sampling of candidates to time for the rank model: few of many, most of them where a search looks.

A search looks at the candidates that are predicted fastest, and at one of each kind (number of tiles, their columns,
blocks to a tile). Ranks are therefore drawn log-uniformly, among all and among the best of each kind; some candidates
are drawn from everywhere, so that the model also learns what is slow.
"""

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan, UnrolledPlans
from lospmm.space.estimate import estimate_micros
from lospmm.space.explore import widen
from lospmm.stages import Stages
from lospmm.tuning.options import splits_of
from lospmm.tuning.unrolled import explore_problem

#: The share that is drawn by rank among all, and among the best of each kind; the rest is drawn from everywhere.
BY_RANK, BY_KIND = 0.4, 0.45

#: Candidates whose estimate is this many times the best are not timed.
SLOWEST = 10.0


def sampled(problem: Problem, count: int, emitter: str, random: np.random.Generator) -> list[UnrolledPlan]:
    """Return at most ``count`` different candidates in random order.

    Among them are the one predicted fastest, and the best of each split. ``problem`` is for the emitter
    (``build.for_emitter``).
    """
    space = explore_problem(problem, Stages(), splits=splits_of(emitter))
    pool = widen(problem, space)
    if not len(pool):
        return []
    estimates = estimate_micros(problem, pool)
    order = np.argsort(estimates, kind="stable")
    order = order[estimates[order] <= SLOWEST * estimates[order[0]]]
    leaders = order[_first_of(_kinds(pool)[order])]
    splits = order[_first_of(pool.split_k[order])]
    chosen = [*order[:1], *splits]
    chosen += list(order[_ranks(len(order), round(BY_RANK * count), random)])
    chosen += list(leaders[_ranks(len(leaders), round(BY_KIND * count), random)])
    chosen += list(random.choice(order, count))
    distinct = list(dict.fromkeys(int(at) for at in chosen))[:count]
    random.shuffle(distinct)
    return [pool[at] for at in distinct]


def _kinds(pool: UnrolledPlans) -> NDArray[np.int64]:
    """Return the kind of each candidate as in a search: tiles and their columns, whatever a tile's rows."""
    tiles = pool.by_tiling(lambda tiling: tiling.count)
    return np.ravel_multi_index((tiles, pool.cols, pool.split_k), (int(tiles.max()) + 1, 1 << 12, 1 << 5))


def _first_of(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of each group's first member, in order."""
    return np.sort(np.unique(groups, return_index=True)[1])


def _ranks(size: int, count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Return ``count`` of ``size`` places, log-uniform: as many from 1 to 10 as from 10 to 100."""
    return np.minimum(np.exp(random.uniform(0, np.log(size + 1), count)).astype(np.int64), size) - 1
