"""Which candidates of a problem are timed for the rank model: few of many, most of them where a search looks.

A search looks at what the estimate puts first, and at one candidate of a kind (so many tiles of so many columns, so
many blocks to a tile). Ranks are therefore drawn evenly by their logarithm, among all and among the best of each kind;
some candidates are drawn from everywhere, so that the model learns what is slow too.
"""

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan, UnrolledPlans
from lospmm.space.estimate import estimate_micros
from lospmm.space.explore import widen
from lospmm.stages import Stages
from lospmm.tuning.options import LOCKSTEPS, splits_of
from lospmm.tuning.search import explore_problem

#: The share that is drawn by rank among all, and among the best of each kind; the rest is drawn from everywhere.
BY_RANK, BY_KIND = 0.4, 0.45

#: What the estimate says takes so many times as long as its first is not worth the time of a GPU.
SLOWEST = 10.0

#: The share that has the ``lockstep`` which a search takes without a measurement; the others have each as many.
FIRST_LOCKSTEP = 0.7


def sampled(problem: Problem, count: int, emitter: str, random: np.random.Generator) -> list[UnrolledPlan]:
    """At most ``count`` different candidates in an order of chance, the estimate's first, and its best of each split,
    among them. ``problem`` is for the emitter (``build.for_emitter``).
    """
    space = explore_problem(problem, Stages(), splits=splits_of(emitter, problem.device.arch))
    values = LOCKSTEPS[emitter]
    pool = widen(problem, space, values[0])
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
    others = len(values) - 1
    shares = [FIRST_LOCKSTEP, *[(1 - FIRST_LOCKSTEP) / others] * others] if others else [1.0]
    widened = {value: pool.with_axis("lockstep", value) for value in values}
    drawn = random.choice(values, len(distinct), p=shares)
    drawn[0] = values[0]
    random.shuffle(mixed := list(zip(distinct, drawn.tolist(), strict=True)))
    return [widened[lockstep][at] for at, lockstep in mixed]


def _kinds(pool: UnrolledPlans) -> NDArray[np.int64]:
    """As ``search`` has them: as many tiles of as many columns differ little in time, whatever the rows of a tile."""
    tiles = pool.by_tiling(lambda tiling: len(tiling.tiles))
    return np.ravel_multi_index((tiles, pool.cols, pool.split_k), (int(tiles.max()) + 1, 1 << 12, 1 << 5))


def _first_of(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each group has its first member, in their order."""
    return np.sort(np.unique(groups, return_index=True)[1])


def _ranks(size: int, count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """``count`` of ``size`` places, even by their logarithm: as many from 1 to 10 as from 10 to 100."""
    return np.minimum(np.exp(random.uniform(0, np.log(size + 1), count)).astype(np.int64), size) - 1
