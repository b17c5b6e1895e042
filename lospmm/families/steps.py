"""Assignment of a panel's columns to steps: similar masks share a step, which saves fragments.

A stream of columns, each with a mask of the subgroups with a nonzero in it, is dealt to steps. Four threads have a
queue each, and a step takes at most ``each`` columns of every queue. A step costs its rows of B, and a product for
each subgroup of the union of its masks.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

QUAD = 4

#: Up to so many subgroups, the best union is looked for among all of them; beyond, columns go in the order of masks.
MAX_SEARCHED = 4

#: What a product for one subgroup costs, where reading the rows of B costs 16 (cycles of an SM, for 64 columns).
PRODUCT_COST = 6.0


def deal(
    queue: NDArray[np.int64], masks: NDArray[np.uint8], *, queues: int, subgroups: int, each: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the step of each column in its stream, and its turn there; ``queue // 4`` is its stream."""
    deal = _by_unions if subgroups in range(2, MAX_SEARCHED + 1) else _in_order
    return deal(queue, masks, queues, subgroups, each)


def _in_order(
    queue: NDArray[np.int64], masks: NDArray[np.uint8], queues: int, _subgroups: int, each: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    order = np.lexsort((_gray_rank(masks), queue))
    length = np.bincount(queue, minlength=queues)
    number = np.empty(len(queue), dtype=np.int64)
    number[order] = np.arange(len(queue)) - np.repeat(np.cumsum(length) - length, length)
    step, turn = np.divmod(number, each)
    return step, turn


def _gray_rank(masks: NDArray[np.uint8]) -> NDArray[Any]:
    """Return a mask's rank in the Gray code, in which neighbours differ in one bit."""
    rank = masks ^ (masks >> 1)
    rank ^= rank >> 2
    return rank ^ (rank >> 4)


def _by_unions(
    queue: NDArray[np.int64], masks: NDArray[np.uint8], queues: int, subgroups: int, each: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Fill steps of all streams one by one, each for the union of masks that uses its cost best.

    A step for a union takes the columns whose masks lie within it, those of most subgroups first.
    """
    kinds = 1 << subgroups
    left = np.bincount(queue * kinds + masks, minlength=queues * kinds).reshape(-1, QUAD, kinds)
    taken = []
    while True:
        active = left.any(axis=(1, 2))
        if not active.any():
            break
        take = np.zeros_like(left)
        take[active] = _best_step(left[active], subgroups, each)
        left = left - take
        taken.append(take.astype(np.int8))
    if not taken:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    # (streams, 4, kinds, steps): how many columns of a kind each step takes, and the turn of the first.
    takes = np.stack(taken, axis=-1)
    turns = np.cumsum(takes, axis=2, dtype=np.int8) - takes
    counts = takes.reshape(-1)
    steps = np.broadcast_to(np.arange(len(taken)), takes.shape).reshape(-1)
    before = np.cumsum(counts, dtype=np.int64) - counts
    turn = np.repeat(turns.reshape(-1), counts) + np.arange(int(counts.sum())) - np.repeat(before, counts)
    order = np.lexsort((masks, queue))
    step_of, turn_of = np.empty(len(queue), np.int64), np.empty(len(queue), np.int64)
    step_of[order], turn_of[order] = np.repeat(steps, counts), turn
    return step_of, turn_of


def _best_step(left: NDArray[np.int64], _subgroups: int, each: int) -> NDArray[np.int64]:
    """Return the columns of ``left``, (streams, 4, kinds), that the next step of each stream takes."""
    best = np.full(len(left), -1.0)
    result = np.zeros_like(left)
    kinds = np.arange(left.shape[2])
    bits = np.bitwise_count(kinds)
    for union in range(1, left.shape[2]):
        within = kinds[(kinds & ~union == 0) & (kinds > 0)]
        within = within[np.argsort(-bits[within], kind="stable")]
        reached = np.minimum(np.cumsum(left[:, :, within], axis=2), each)
        take = np.diff(reached, axis=2, prepend=0)
        of_kind = take.sum(axis=1)
        worth = of_kind @ (1 + PRODUCT_COST / 16 * bits[within]) / (16 + PRODUCT_COST * int(bits[union]))
        better = worth > best
        best[better] = worth[better]
        result[better] = 0
        result[np.ix_(better.nonzero()[0], np.arange(QUAD), within)] = take[better]
    return result
