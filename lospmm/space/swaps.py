"""Swaps of rows between tiles, which improve the tiles of Algorithm 1.

The work of a tile is a multiply-add per nonzero and a load per non-empty column. ``swapped`` exchanges rows of two
tiles as long as that lowers the sum of the squares of all tiles' work: there are then fewer loads, and tiles are more
alike. It is a local search (Kernighan and Lin, An Efficient Heuristic Procedure for Partitioning Graphs, 1970) of many
swaps at a time. All figures are whole numbers, so that every machine finds the same tiles.
"""

import numpy as np
from numpy.typing import NDArray

from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.problem import ceil_div
from lospmm.space.candidates import Ints, Tiling
from lospmm.space.reorder import WORD_BITS, nonempty_rows, tiling_of

#: The most 64-bit words of masks that are compared: a few hundredths of a second.
MAX_WORDS = 20_000_000

#: Rows of a tile that are tried for a swap with each other tile.
TRIED = 3

#: Words whose comparison takes as long as computing the effect of one move.
MOVE_WORDS = 2


def swapped(matrix: SparseMatrix, tiling: Tiling) -> Tiling:
    """Return ``tiling`` with rows swapped: as many tiles, of work whose sum of squares is no greater.

    Large tilings stay as they are. Raises BadRequest as ``regroup``.
    """
    tiles, slots = tiling.count, tiling.count * tiling.size_limit
    words, moves = ceil_div(matrix.k, WORD_BITS), slots * tiles
    if tiles < 2 or 2 * moves * (words + MOVE_WORDS) > MAX_WORDS:
        return tiling
    rows = nonempty_rows(matrix)
    placed = _Placed(rows.mask, rows.nnz, np.searchsorted(rows.index, tiling.rows), tiling)
    left = MAX_WORDS - moves * words
    while left > 0 and len(changed := placed.swap()):
        left -= slots * len(changed) * words + moves * MOVE_WORDS
    return tiling_of(rows, placed.placement(len(rows)), tiling.size_limit, tiling.empty_rows)


class _Placed:
    """Rows in the slots of tiles, M1 each. A row without nonzeros stands for an empty slot, so moves are swaps too."""

    def __init__(self, mask: NDArray[np.uint64], nnz: Ints, order: Ints, tiling: Tiling) -> None:
        """Place the rows ``order`` of ``mask``, (rows, words), and ``nnz``, (rows,), as in ``tiling``."""
        self.tiles, self.limit = tiling.count, tiling.size_limit
        slots, words = self.tiles * self.limit, mask.shape[1]
        filled = np.arange(len(order)) + np.repeat(np.arange(self.tiles) * self.limit - tiling.starts, tiling.sizes)
        self.row = np.full(slots, -1)
        self.row[filled] = order
        self.mask, self.nnz = np.zeros((words, slots), dtype=np.uint64), np.zeros(slots, dtype=np.int64)
        self.mask[:, filled], self.nnz[filled] = mask[order].T, nnz[order]
        self.tile = np.repeat(np.arange(self.tiles), self.limit)
        self.work = np.zeros(self.tiles, dtype=np.int64)
        self.only = np.zeros((words, self.tiles), dtype=np.uint64)  # columns of one row of a tile
        self.removed = np.zeros(slots, dtype=np.int64)  # work of a tile that ends if the row of a slot leaves it
        self.added = np.zeros((self.tiles, slots), dtype=np.int64)  # work of a tile that comes with the row of a slot
        self._update(np.arange(self.tiles))

    def _update(self, tiles: Ints) -> None:
        own = (tiles[:, np.newaxis] * self.limit + np.arange(self.limit)).ravel()
        masks = self.mask[:, own].reshape(len(self.mask), len(tiles), self.limit)
        occupied, several = np.zeros((2, *masks.shape[:2]), dtype=np.uint64)
        for slot in range(self.limit):
            several |= occupied & masks[:, :, slot]
            occupied |= masks[:, :, slot]
        self.only[:, tiles] = occupied & ~several
        self.work[tiles] = self.nnz[own].reshape(len(tiles), self.limit).sum(axis=1) + _bits(occupied)
        self.removed[own] = self.nnz[own] + _bits(self.mask[:, own] & self.only[:, self.tile[own]])
        common = np.zeros((len(tiles), len(self.nnz)), dtype=np.int32)
        for mask, columns in zip(self.mask, occupied, strict=True):
            common += np.bitwise_count(columns[:, np.newaxis] & mask)
        self.added[tiles] = 2 * self.nnz - common

    def swap(self) -> Ints:
        """Swap one row each of several pairs of tiles, if that gains; return the tiles that changed.

        Of a pair, the rows are among the TRIED whose moves gain most. What both moves together gain is counted exactly.
        """
        cost = self.work[:, np.newaxis] * self.added - self.work[self.tile] * self.removed
        cost = cost.reshape(self.tiles, self.tiles, self.limit)  # of a move: [to, from, slot]
        slots, costs = [], []
        for _ in range(min(TRIED, self.limit)):  # not argpartition, whose order of equals depends on the machine
            slots.append(cost.argmin(axis=2, keepdims=True))
            costs.append(np.take_along_axis(cost, slots[-1], axis=2))
            np.put_along_axis(cost, slots[-1], np.iinfo(np.int64).max, axis=2)
        slot, least = np.concatenate(slots, axis=2), np.concatenate(costs, axis=2)
        both = least.transpose(1, 0, 2)[:, :, :, np.newaxis] + least[:, :, np.newaxis]
        later = np.triu(np.ones((self.tiles, self.tiles), dtype=np.bool_), 1)[:, :, np.newaxis, np.newaxis]
        one, other, first, second = np.nonzero((both < 0) & later)
        left, right = one * self.limit + slot[other, one, first], other * self.limit + slot[one, other, second]
        common = self.mask[:, left] & self.mask[:, right]
        changes = np.stack(
            (
                self.added[one, right] - self.removed[left] + _bits(common & self.only[:, one]),
                self.added[other, left] - self.removed[right] + _bits(common & self.only[:, other]),
            )
        )
        squares = (changes * (2 * self.work[np.stack((one, other))] + changes)).sum(axis=0)
        good = np.flatnonzero(squares < 0)
        is_taken = np.zeros(self.tiles, dtype=np.bool_)
        chosen: list[int] = []
        for pair in good[np.argsort(squares[good], kind="stable")].tolist():
            if not is_taken[one[pair]] and not is_taken[other[pair]]:
                is_taken[[one[pair], other[pair]]] = True
                chosen.append(pair)
        to, source = (np.concatenate(ends) for ends in ((left[chosen], right[chosen]), (right[chosen], left[chosen])))
        for figures in (self.row, self.nnz, self.mask, self.added):
            figures[..., to] = figures[..., source]
        changed = np.flatnonzero(is_taken)
        self._update(changed)
        return changed

    def placement(self, count: int) -> Ints:
        """Return the tile of each of ``count`` rows."""
        found = np.empty(count, dtype=np.int64)
        found[self.row[self.row >= 0]] = self.tile[self.row >= 0]
        return found


def _bits(masks: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the bits in each column of masks, (words, columns)."""
    found: NDArray[np.int64] = np.add.reduce(np.bitwise_count(masks), axis=0, dtype=np.int64)
    return found
