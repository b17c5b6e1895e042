"""Row regrouping (section 4, Algorithm 1): rows with nonzeros in the same columns share a tile.

``regroup`` handles every M1 of a search at once. It compares a row with all tiles of all M1, as bit masks of non-empty
columns, so that each row takes a few array operations however many M1 there are.
"""

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadRequest
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.problem import ceil_div
from lospmm.space.candidates import Tiling

WORD_BITS = 64

#: The most non-empty rows x non-empty columns: the masks, a bit per cell, then take 1 GiB.
MAX_CELLS = 2**33

#: Bytes that the tiles of all M1 in progress may take, beyond one M1 per worker.
WORK_BYTES = 2**30

#: Rows x columns from which several threads are used: below, they slow each other down.
THREADED_CELLS = 2**22
MOST_THREADS = 4


@dataclass(frozen=True, slots=True, eq=False)
class FilledRows:
    """Non-empty rows of A, in some order."""

    index: NDArray[np.int32]  # (rows,)
    nnz: NDArray[np.int64]  # (rows,)
    mask: NDArray[np.uint64]  # (rows, words): bit i % 64 of word i // 64 stands for the i-th non-empty column

    def __len__(self) -> int:
        return len(self.index)


def regroup(matrix: SparseMatrix, size_limits: Sequence[int], *, workers: int = 1) -> dict[int, Tiling]:
    """Return the tiling of Algorithm 1 for each M1 of ``size_limits``, ascending; tiles by ascending ID.

    ``workers`` threads share the values of M1; two halve the time of large matrices and gain little below some
    millions of cells. Raises BadRequest for an M1 below 1 and for a matrix of more than MAX_CELLS.
    """
    rows = nonempty_rows(matrix)
    order = np.argsort(rows.nnz, kind="stable")
    rows = FilledRows(rows.index[order], rows.nnz[order], rows.mask[order])
    limits = sorted(set(size_limits))
    _require_positive(limits)
    # With one row per tile, or one tile for all rows, there is no choice: row i goes to tile i, or to tile 0.
    placements: dict[int, NDArray[np.integer]] = {
        limit: np.arange(len(rows)) // limit for limit in limits if limit == 1 or limit >= len(rows)
    }
    shares = _shares(rows, [limit for limit in limits if limit not in placements], workers)
    with ThreadPoolExecutor(max_workers=workers) as pool:
        for share, placed in zip(shares, pool.map(lambda share: _place(rows, share), shares), strict=True):
            placements.update(zip(share, placed, strict=True))
    empty_rows = _empty_rows(matrix)
    return {limit: tiling_of(rows, placements[limit], limit, empty_rows) for limit in limits}


def threads_for(matrix: SparseMatrix) -> int:
    """Return the ``workers`` of ``regroup`` that are fastest for ``matrix`` on this machine."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0))) if matrix.m * matrix.k >= THREADED_CELLS else 1


def natural_order(matrix: SparseMatrix, size_limit: int) -> Tiling:
    """Return the tiling without reordering: M1 consecutive non-empty rows per tile.

    Raises BadRequest as ``regroup``.
    """
    _require_positive([size_limit])
    rows = nonempty_rows(matrix)
    return tiling_of(rows, np.arange(len(rows)) // size_limit, size_limit, _empty_rows(matrix))


def _require_positive(limits: Sequence[int]) -> None:
    if limits and min(limits) < 1:
        raise BadRequest(f"a tile of at most {min(limits)} rows: M1 must be 1 or more")


def nonempty_rows(matrix: SparseMatrix) -> FilledRows:
    """Return the non-empty rows of A, ascending. Raises BadRequest for a matrix of more than MAX_CELLS."""
    row_nnz = matrix.row_nnz
    index = np.flatnonzero(row_nnz).astype(np.int32)
    # Only non-empty columns have a bit, so that masks of a wide, sparse matrix stay small.
    columns, column = np.unique(matrix.indices, return_inverse=True)
    if len(index) * len(columns) > MAX_CELLS:
        raise BadRequest(
            f"{len(index)} non-empty rows x {len(columns)} non-empty columns are too many to regroup: "
            f"at most {MAX_CELLS} cells"
        )
    mask = np.zeros((len(index), ceil_div(len(columns), WORD_BITS)), dtype=np.uint64)
    word, bit = np.divmod(column, WORD_BITS)
    position = np.repeat(np.arange(len(index)), row_nnz[index])
    np.bitwise_or.at(mask, (position, word), np.uint64(1) << bit.astype(np.uint64))
    return FilledRows(index, row_nnz[index], mask)


def _empty_rows(matrix: SparseMatrix) -> NDArray[np.int32]:
    return np.flatnonzero(matrix.row_nnz == 0).astype(np.int32)


def _shares(rows: FilledRows, limits: Sequence[int], workers: int) -> list[Sequence[int]]:
    """Split ``limits`` into runs of about as many tiles, which decide time and memory.

    One run per worker, or more if the memory would exceed WORK_BYTES.
    """
    if not limits:
        return []
    tiles = np.cumsum([ceil_div(len(rows), limit) for limit in limits])
    tile_bytes = rows.mask.shape[1] * (8 + 8 + 1)  # occupied, common and common_count of _place
    count = max(workers, ceil_div(workers * int(tiles[-1]) * tile_bytes, WORK_BYTES))
    targets = tiles[-1] * np.arange(1, count) / count
    ends = [0, *np.searchsorted(tiles, targets, side="right").tolist(), len(limits)]
    return [limits[start:end] for start, end in itertools.pairwise(ends) if start < end]


def _place(rows: FilledRows, limits: Sequence[int]) -> NDArray[np.int32]:
    """Run lines 5 to 24 of Algorithm 1 for every M1 of ``limits``; return each row's tile, (limits, rows).

    The tiles of all M1 are side by side, those of ``limits[i]`` from ``starts[i]`` on. The order of line 10 and the
    choice of lines 12 to 22 are encoded as one number per tile, (state, nnc after the merge, ID), and the least wins:
    state 0 may take the row, 1 has reached TH_nnz, 2 is full.
    """
    total_nnz = int(rows.nnz.sum())
    limit = np.asarray(limits)
    count = -(-len(rows) // limit)  # num_A_tile of each M1
    starts = np.cumsum(count) - count
    tiles = int(count.sum())
    words = rows.mask.shape[1]
    id_span, nnc_span = int(count.max()), words * WORD_BITS + 1
    overlap_type = next(kind for kind in (np.uint8, np.uint16, np.int64) if rows.nnz[-1] <= np.iinfo(kind).max)

    occupied = np.zeros((words, tiles), dtype=np.uint64)
    size, nnz, nnc = (np.zeros(tiles, dtype=np.int64) for _ in range(3))
    rank = np.arange(tiles) - np.repeat(starts, count)  # the number above, before the merge

    common = np.empty_like(occupied)
    common_count = np.empty((words, tiles), dtype=np.uint8)
    overlap = np.empty(tiles, dtype=overlap_type)
    key = np.empty(tiles, dtype=np.int64)
    placement = np.empty((len(limits), len(rows)), dtype=np.int32)
    for step in range(len(rows)):
        mask = rows.mask[step][:, np.newaxis]
        row_nnz = rows.nnz[step]
        np.bitwise_and(occupied, mask, out=common)
        np.bitwise_count(common, out=common_count)
        np.add.reduce(common_count, axis=0, dtype=overlap_type, out=overlap)
        # nnc after the merge = nnc + row_nnz - overlap; row_nnz is the same for every tile and left out.
        np.multiply(overlap, np.int64(id_span), out=key)
        np.subtract(rank, key, out=key)
        chosen_id = np.minimum.reduceat(key, starts) % id_span
        chosen = starts + chosen_id
        placement[:, step] = chosen_id

        size[chosen] += 1
        nnz[chosen] += row_nnz
        nnc[chosen] += row_nnz - overlap[chosen]
        occupied[:, chosen] |= mask
        # nnz < TH_nnz as whole numbers: TH_nnz = total_nnz / count need not be one.
        state = np.where(size[chosen] == limit, 2, nnz[chosen] * count >= total_nnz)
        rank[chosen] = (state * nnc_span + nnc[chosen]) * id_span + chosen_id
    return placement


def tiling_of(
    rows: FilledRows, placement: NDArray[np.integer], size_limit: int, empty_rows: NDArray[np.int32]
) -> Tiling:
    """Return the tiling of ``placement``, (rows,): the tile of each row. No tile is empty."""
    order = np.lexsort((rows.index, placement))
    starts = np.flatnonzero(np.diff(placement[order], prepend=-1))
    index = rows.index[order]
    index.setflags(write=False)
    sizes = np.diff(starts, append=len(order))
    nnz = np.add.reduceat(rows.nnz[order], starts, dtype=np.int64)
    occupied = np.bitwise_or.reduceat(rows.mask[order], starts, axis=0)
    nnc = np.bitwise_count(occupied).sum(axis=1, dtype=np.int64)
    return Tiling(size_limit, index, sizes, nnz, nnc, empty_rows)
