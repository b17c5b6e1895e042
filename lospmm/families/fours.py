"""Columns in fours of which no row has more than two: what sparse tensor cores multiply, of a matrix pruned anyhow.

Which columns are neighbours is free. They are chosen one by one: to a four comes the column that the fewest of those
rows take which have two of the four already. What does not fit is put aside and ordered once more, in fours of its own
behind the others; so a column may come twice.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lospmm.matrix import SparseMatrix

#: Columns that are looked at for the next place of a four.
CANDIDATES = 512

_WORD = 64


class Fours(NamedTuple):
    columns: NDArray[np.int32]  # (4 x fours,): of A; where nothing is taken of one, any
    weights: NDArray[np.float32]  # (rows, fours, 2)
    places: NDArray[np.uint8]  # (rows, fours, 2): which of four, the first before the second


def order_in_fours(matrix: SparseMatrix, first: int, rows: int, *, multiple: int = 1) -> Fours:
    """Of ``rows`` rows of A from ``first`` on; the last ones may not be there. At least ``multiple`` fours, and a
    multiple of these."""
    last = min(first + rows, matrix.m)
    begin, end = matrix.indptr[first], matrix.indptr[last]
    row = np.repeat(np.arange(last - first), matrix.row_nnz[first:last])
    dense = np.zeros((rows, matrix.k), dtype=np.float32)
    dense[row, matrix.indices[begin:end]] = matrix.data[begin:end]
    left = dense != 0
    chosen, kept = [np.zeros((0, 4), np.int64)], [np.zeros((rows, 0, 4), np.bool_)]
    while left.any():
        fours = _fours(left)
        taken = left[:, fours]
        taken[:, :, 1:] &= fours[:, 1:] != fours[:, :1]  # what only fills up a four repeats its first column
        aside = _set_aside(taken)
        row, four, place = np.nonzero(aside)
        left[:] = False
        left[row, fours[four, place]] = True
        chosen.append(fours)
        kept.append(taken & ~aside)
    columns, is_kept = np.concatenate(chosen), np.concatenate(kept, axis=1)
    missing = -len(columns) % multiple if len(columns) else multiple
    columns = np.concatenate((columns, np.full((missing, 4), columns.flat[0] if len(columns) else 0)))
    is_kept = np.concatenate((is_kept, np.zeros((rows, missing, 4), np.bool_)), axis=1)
    return Fours(columns.reshape(-1).astype(np.int32), *_twos(is_kept, dense[:, columns]))


def _fours(there: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The columns with anything there, (fours, 4), those with most first."""
    rows = len(there)
    padded = np.zeros((-(-rows // _WORD) * _WORD, there.shape[1]), dtype=bool)
    padded[:rows] = there
    bits = np.ascontiguousarray(np.packbits(padded.T, axis=1)).view(np.uint64)
    counts = np.count_nonzero(there, axis=0)
    left = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    chosen = []
    while len(left):
        candidates = bits[left[:CANDIDATES]]
        is_free = np.ones(len(candidates), dtype=bool)
        four, once, twice = [0], candidates[0].copy(), np.zeros_like(candidates[0])
        is_free[0] = False
        while len(four) < min(4, len(candidates)):
            # Two fit whatever they are: the second leaves the most rows with one, for those that follow.
            crowded = np.bitwise_count(candidates & (twice if len(four) > 1 else once)).sum(axis=1, dtype=np.int64)
            best = int(np.where(is_free, crowded, rows + 1).argmin())
            twice |= once & candidates[best]
            once |= candidates[best]
            is_free[best] = False
            four.append(best)
        chosen.append(left[four + [0] * (4 - len(four))])
        left = np.delete(left, four)
    return np.array(chosen)


def _set_aside(taken: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """What does not fit, so that two are left: of each four all that crowded rows have in one column, and so on."""
    left, aside = taken.copy(), np.zeros_like(taken)
    while (crowded := np.count_nonzero(left, axis=2) > 2).any():
        of_four = np.flatnonzero(crowded.any(axis=0))
        place = np.count_nonzero(left[:, of_four] & crowded[:, of_four, np.newaxis], axis=0).argmax(axis=1)
        more = left[:, of_four, place] & crowded[:, of_four]
        aside[:, of_four, place] |= more
        left[:, of_four, place] &= ~more
    return aside


def _twos(is_kept: NDArray[np.bool_], weights: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """The weights that are kept and their places, of (rows, fours, 4); what has fewer than two gets zeros."""
    places = np.argsort(~is_kept, axis=2, kind="stable")[:, :, :2]
    places.sort(axis=2)
    kept = np.where(is_kept, weights, np.float32(0))
    return np.take_along_axis(kept, places, axis=2), places.astype(np.uint8)
