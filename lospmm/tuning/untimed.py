"""The choice of an unrolled kernel where nothing is timed, by the models of ``lospmm_rank.predict.untimed``."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lospmm.problem.dtype import FLOAT32
from lospmm.problem.lanes import NARROW, SINGLE, lanes_of
from lospmm.problem.problem import Problem, ceil_div
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.ranker import Ranker, shortlist
from lospmm.tuning.options import Options
from lospmm.tuning.search import Choice, spread_over
from lospmm.tuning.trial import Scored
from lospmm_rank.predict import lambdamart
from lospmm_rank.predict.untimed import SUFFIXES, WEIGHTS, _digest, features, model_at

#: Whose kernels it has learned of.
EMITTER = "sass"

#: What a search lists of each, for these to be chosen from.
LISTED = 400

#: Of the ranker's order, and of the estimate's of two columns to a thread; and more of each that differ in the columns
#: and the number of their blocks, of which these two know little.
SINGLES, DOUBLES = 12, 16

OTHER_SINGLES, OTHER_DOUBLES = 24, 40


def model_for(problem: Problem, options: Options) -> Path | None:
    """The first file of the models that choose where nothing is timed; None where the ranker's first is taken: in
    float32, with sums of 16 bits, for convolutions, and where there is none beside the rank model that is asked.
    ``options`` are resolved.
    """
    device = problem.device
    is_learned = problem.convolution is None and problem.dtype != FLOAT32 and lanes_of(problem) in (SINGLE, NARROW)
    if options.measure == "gpu" or options.ranker != "lambdamart" or options.emitter != EMITTER or not is_learned:
        return None
    beside = lambdamart.find_model(device)
    path = WEIGHTS / f"{device.name}{SUFFIXES[0]}"
    return path if beside is not None and beside.parent == lambdamart.WEIGHTS and path.is_file() else None


def model_digest(problem: Problem, options: Options) -> str | None:
    """What tells the models from others: sha256 over their files; None where there are none."""
    path = model_for(problem, options)
    return None if path is None else _digest(path)


def chosen(
    problem: Problem, choice: Choice, ranker: Ranker, model: Path, *, locksteps: Sequence[int], size: int
) -> Choice:
    """``choice``, in which nothing was timed and which lists LISTED of each, with what ``model`` puts first: ``size``
    candidates, their scores the model's. ``problem`` is that of a search (``lanes.in_lanes``).
    """
    candidates = considered(problem, choice, locksteps)
    scores, micros = model_at(model).says(features(problem, candidates, ranker))
    order = np.argsort(scores, kind="stable")
    listed = tuple(Scored(candidates[at], float(scores[at])) for at in order[:size])
    own = float(micros[order[0]])
    return replace(choice, winner=listed[0].candidate, shortlist=listed, doubles=(), forecast_micros=own)


def considered(problem: Problem, choice: Choice, locksteps: Sequence[int]) -> list[UnrolledPlan]:
    """What may be chosen of a ``choice`` in which nothing was timed; its winner is the first.

    ``problem`` is that of a search (``lanes.in_lanes``).
    """
    singles, doubles = (
        _candidates(spread_over(_of_all_kinds(listed, size, _tiles_of), locksteps))
        for listed, size in ((choice.shortlist, SINGLES), (choice.doubles, DOUBLES))
    )
    first = _distinct([choice.winner, *singles])[:SINGLES]
    if choice.doubles:
        first = _distinct([*first, *doubles])
    return _distinct([*first, *_others(problem, choice, locksteps, first)])


def _others(
    problem: Problem, choice: Choice, locksteps: Sequence[int], known: Sequence[UnrolledPlan]
) -> list[UnrolledPlan]:
    """More of what is listed, of tiles that are not ``known``."""

    def blocks_of(one: UnrolledPlan) -> tuple[int, int]:
        """The columns, and the number to a factor of the square root of two."""
        blocks = len(one.tiling.tiles) * ceil_div(problem.n, one.tile.cols * one.schedule.thread_words)
        return one.tile.cols, round(2 * math.log2(max(blocks, 1) * one.schedule.split_k))

    tiles = {(one.tile, one.schedule.thread_words) for one in known}
    found: list[UnrolledPlan] = []
    for listed, size in ((choice.shortlist, OTHER_SINGLES), (choice.doubles, OTHER_DOUBLES)):
        of_each = _candidates(spread_over(_of_all_kinds(listed, size, blocks_of), locksteps))
        found += [one for one in of_each if (one.tile, one.schedule.thread_words) not in tiles]
    return found


def _of_all_kinds(
    listed: Sequence[Scored[UnrolledPlan]], size: int, kind_of: Callable[[UnrolledPlan], tuple[int, int]]
) -> list[Scored[UnrolledPlan]]:
    """As ``search`` lists no more than ``size``, by kinds of one's own."""
    if not listed:
        return []
    splits = np.array([one.candidate.schedule.split_k for one in listed])
    kinds = np.column_stack((np.array([kind_of(one.candidate) for one in listed]), splits))
    chosen = shortlist(np.array([one.score for one in listed]), size, kinds, splits)
    return [listed[at] for at in chosen]


def _tiles_of(one: UnrolledPlan) -> tuple[int, int]:
    return len(one.tiling.tiles), one.tile.cols


def _candidates(listed: Iterable[Scored[UnrolledPlan]]) -> list[UnrolledPlan]:
    return [one.candidate for one in listed]


def _distinct(candidates: Iterable[UnrolledPlan]) -> list[UnrolledPlan]:
    found: dict[tuple[TileSize, Schedule], UnrolledPlan] = {}
    for one in candidates:
        found.setdefault((one.tile, one.schedule), one)
    return list(found.values())
