"""When the rows of a tile are stored: each as soon as its sum is whole (``Schedule.stores_early``), not all at the end.

Elements of B are loaded as they are numbered all the same. Tiles that load them in orders of their own, in which rows
are finished one after another, take longer: blocks that run at the same time no longer ask for the same rows of B
(docs/decisions/0026).

A thread has one register pair beside that of row 0 to reach far rows of C by (``codegen.sass``). Where that is not
enough for all, rows that lie together are stored together.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lospmm.model import Candidate, Problem, Schedule

#: Of the windows of C, those that a thread reaches in any order.
FREE_WINDOWS = 2

#: Instructions between the last multiply-add of a row and its store, so that no warp waits for the sum.
DISTANCE = 8


def may_store_early(problem: Problem, schedule: Schedule) -> bool:
    """Whether rows may be stored before the end of a tile: a residual is added behind all sums, and the parts of a tile
    meet behind them."""
    return not problem.epilogue.residual and schedule.split_k == 1


def stored_early(problem: Problem, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those of ``candidates`` that may store rows early, so that they do."""
    return [
        replace(candidate, schedule=replace(candidate.schedule, stores_early=True))
        for candidate in candidates
        if may_store_early(problem, candidate.schedule) and not candidate.schedule.stores_early
    ]


def store_places(
    accumulator: NDArray[np.integer], is_sum: NDArray[np.bool_], window_of_row: NDArray[np.int64]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The rows of a tile in the order in which they are stored, and before which instruction each is.

    ``accumulator`` and ``is_sum`` say of each instruction what it adds to, if it does: of row i accumulator i, or
    others that are added to it.
    """
    rows = len(window_of_row)
    last = np.zeros(rows, np.intp)
    sums = np.flatnonzero(is_sum & (accumulator < rows))
    last[accumulator[sums]] = sums  # of several the last one stays
    is_far = int(window_of_row.max(initial=0)) >= FREE_WINDOWS
    order = np.lexsort((last, window_of_row)) if is_far else np.argsort(last, kind="stable")
    place = np.maximum.accumulate(last[order]) + DISTANCE
    return order, np.minimum(place, len(accumulator))
