"""The choice of an unrolled kernel without timing, by the models of ``lospmm_rank.predict.untimed``."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lospmm.families.candidate import Candidate, unrolled
from lospmm.problem.problem import Problem, ceil_div
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.ranker import Ranker, shortlist
from lospmm.tuning.known import Choice
from lospmm_rank.predict.untimed import features, model_at

#: Candidates of one and of two words per thread that a search lists for these models.
LISTED = 400

#: Candidates that the models rank: the first of the ranker, and the first of the estimate with two words per thread;
#: then more of each that differ in the columns and number of blocks, which those two rank less well.
SINGLES, WIDE = 12, 16

OTHER_SINGLES, OTHER_WIDE = 24, 40


def chosen(problem: Problem, choice: Choice, ranker: Ranker, model: Path, *, size: int) -> Choice:
    """Return ``choice`` with the ``size`` candidates that the models predict fastest, and their scores.

    ``choice`` lists LISTED candidates of one and of two words per thread. ``problem`` is in words (``lanes.in_lanes``),
    ``model`` the first file of the models.
    """
    candidates = considered(problem, choice)
    scores, micros = model_at(model).says(features(problem, candidates, ranker))
    order = np.argsort(scores, kind="stable")
    listed = tuple(unrolled(candidates[at], float(scores[at])) for at in order[:size])
    own = float(micros[order[0]])
    return replace(choice, winner=listed[0], shortlist=listed, wide=(), forecast_micros=own)


def considered(problem: Problem, choice: Choice) -> list[UnrolledPlan]:
    """Return the candidates of ``choice`` that the models rank, its winner first.

    ``problem`` is in words (``lanes.in_lanes``).
    """
    singles, wide = (
        _of_all_kinds(listed, size, lambda one: (one.tiling.count, one.tile.cols))
        for listed, size in ((choice.shortlist, SINGLES), (choice.wide, WIDE))
    )
    first = _distinct([*_distinct([choice.winner.plan, *singles])[:SINGLES], *wide])
    return _distinct([*first, *_others(problem, choice, first)])


def _others(problem: Problem, choice: Choice, known: Sequence[UnrolledPlan]) -> list[UnrolledPlan]:
    """Return more of the listed candidates, with tile sizes that are not ``known``."""

    def blocks_of(one: UnrolledPlan) -> tuple[int, int]:
        """Return the columns of a block, and the number of blocks in steps of the square root of two."""
        blocks = one.tiling.count * ceil_div(problem.n, one.tile.cols * one.schedule.thread_words)
        return one.tile.cols, round(2 * math.log2(max(blocks, 1) * one.schedule.split_k))

    tiles = {(one.tile, one.schedule.thread_words) for one in known}
    found: list[UnrolledPlan] = []
    for listed, size in ((choice.shortlist, OTHER_SINGLES), (choice.wide, OTHER_WIDE)):
        of_each = _of_all_kinds(listed, size, blocks_of)
        found += [one for one in of_each if (one.tile, one.schedule.thread_words) not in tiles]
    return found


def _of_all_kinds(
    listed: Sequence[Candidate], size: int, kind_of: Callable[[UnrolledPlan], tuple[int, int]]
) -> list[UnrolledPlan]:
    """Return up to ``size`` of ``listed``, one of each kind as ``kind_of`` and split-K define it."""
    if not listed:
        return []
    splits = np.array([one.plan.schedule.split_k for one in listed])
    kinds = np.column_stack((np.array([kind_of(one.plan) for one in listed]), splits))
    chosen = shortlist(np.array([one.score for one in listed]), size, [kinds], splits)
    return [listed[at].plan for at in chosen]


def _distinct(candidates: Iterable[UnrolledPlan]) -> list[UnrolledPlan]:
    found: dict[tuple[TileSize, Schedule], UnrolledPlan] = {}
    for one in candidates:
        found.setdefault((one.tile, one.schedule), one)
    return list(found.values())
