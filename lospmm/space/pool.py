"""The pool of candidates that a search may time, with their forecasts and coordinates."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.problem import Problem
from lospmm.space.axes import wide_plans
from lospmm.space.candidates import Floats, Ints, Pool, UnrolledPlans
from lospmm.space.estimate import estimate_micros
from lospmm.space.explore import PREFETCHES, Space, widen
from lospmm.space.ranker import Ranker

#: Most candidates in the pool, one of each kind and schedule, and their forecast over the least.
LOOKED_AT = 12_000
WORTH = 2.2

#: Distance between candidates of one and of two words per thread: a time of one says little about the other. By the
#: times of 473 float16 problems (rank_model/data/untimed.jsonl.gz), 2 to 3 have the greatest likelihood.
APART = 3.0

#: Coordinate of each column group; 0: all column blocks.
_GROUPS: Mapping[int, float] = MappingProxyType({1: 0.0, 2: 0.7, 0: 1.5})


def pool_of_space(problem: Problem, space: Space, ranker: Ranker, *, is_wide: bool = False) -> Pool:
    """Return the pool of a space: its survivors with every schedule, as far as they are worth timing.

    ``is_wide`` adds candidates with two words per thread, which the estimate ranks instead of ``ranker``.
    """
    spaces = [(widen(problem, space), ranker)]
    if is_wide:
        spaces.append((wide_plans(problem, space), estimate_micros))
    parts, forecasts = [], []
    for every, own_ranker in spaces:
        forecast = _forecast(problem, every, own_ranker)
        chosen = _distinct(every, forecast)
        parts.append(every.take(chosen))
        forecasts.append(forecast[chosen])
    places = np.concatenate([places_of(part) for part in parts])
    kinds = np.concatenate([_kinds(part) for part in parts])
    return Pool(tuple(parts), places, np.concatenate(forecasts), kinds)


def _forecast(problem: Problem, candidates: UnrolledPlans, ranker: Ranker) -> Floats:
    """Return logarithms of microseconds, (candidates,): the estimates, reassigned in the ranker's order."""
    estimates = np.log(estimate_micros(problem, candidates))
    if ranker is estimate_micros:
        return estimates
    forecast = np.empty_like(estimates)
    forecast[np.argsort(ranker(problem, candidates), kind="stable")] = np.sort(estimates)
    return forecast


def _distinct(candidates: UnrolledPlans, forecast: Floats) -> NDArray[np.int64]:
    """Return indices of the best candidate of each kind and schedule, within LOOKED_AT and WORTH.

    Best forecast first.
    """
    order = np.argsort(forecast, kind="stable")
    key = _kinds(candidates) * len(candidates.schedules) + candidates.schedule
    _, first = np.unique(key[order], return_index=True)
    order = order[np.sort(first)][:LOOKED_AT]
    worth: NDArray[np.int64] = order[forecast[order] <= forecast[order[0]] + np.log(WORTH)].astype(np.int64)
    return worth


def _kinds(candidates: UnrolledPlans) -> Ints:
    """Return a number for each candidate's kind, (candidates,).

    Candidates of a kind have as many tiles, columns, blocks per tile and words per thread.
    """
    tiles = candidates.by_tiling(lambda tiling: tiling.count)
    cols = tiles * (int(candidates.cols.max(initial=0)) + 1) + candidates.cols
    kinds: Ints = (cols * 16 + candidates.split_k) * 2 + (candidates.thread_words > 1)
    return kinds


def places_of(candidates: UnrolledPlans) -> Floats:
    """Return the coordinates of candidates, (candidates, axes): near ones have similar times."""
    schedules = candidates.schedules
    by_schedule = np.array(
        [
            (
                1.5 * np.log2(one.split_k),
                0.5 * float(np.searchsorted(PREFETCHES, one.prefetch)),
                _GROUPS[one.column_group],
                APART * (one.thread_words > 1),
            )
            for one in schedules
        ]
    ).reshape(len(schedules), 4)
    tiles = candidates.by_tiling(lambda tiling: max(tiling.count, 1))
    sizes = (2 * np.log2(tiles), 2 * np.log2(candidates.cols), np.log2(candidates.rows))
    return np.column_stack((*sizes, by_schedule[candidates.schedule]))
