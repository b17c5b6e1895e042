"""Dense blocks that cover a sparse matrix: how full they are at each size, and their numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.problem import ceil_div

#: Sides of blocks. The least is the tensor cores' (rows of A of an instruction).
SIDES = (8, 16, 32, 64)

#: Nonzeros of a sample of a large matrix's rows, in strips, in which blocks are counted; and its fewest strips.
SAMPLED_NONZEROS = 1 << 19
LEAST_STRIPS = 4

#: The most blocks, empty ones included, that are marked one by one.
MAX_MARKS = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The blocks of ``rows`` x ``cols`` that hold a nonzero, by block row and then by block column."""

    indptr: NDArray[np.int64]  # (block rows + 1,)
    columns: NDArray[np.int64]  # (blocks,), block columns
    keys: NDArray[np.int64]  # (blocks,): block row x block columns + block column, ascending


def strips_of(matrix: SparseMatrix) -> SparseMatrix:
    """Return a sample of a large matrix's rows, in strips, with about SAMPLED_NONZEROS nonzeros.

    A smaller matrix is returned unchanged. The sample has a fixed seed: the same matrix has the same sample.
    """
    strips = ceil_div(matrix.m, SIDES[-1])
    count = max(LEAST_STRIPS, strips * SAMPLED_NONZEROS // max(1, matrix.nnz))
    if count >= strips:
        return matrix
    drawn = np.sort(np.random.default_rng(0).choice(strips, count, replace=False)) * SIDES[-1]
    rows = [slice(int(first), min(int(first) + SIDES[-1], matrix.m)) for first in drawn]
    held = [slice(int(matrix.indptr[own.start]), int(matrix.indptr[own.stop])) for own in rows]
    lengths = np.concatenate([np.diff(matrix.indptr[own.start : own.stop + 1]) for own in rows])
    indptr = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    indices, data = (np.concatenate([array[own] for own in held]) for array in (matrix.indices, matrix.data))
    return SparseMatrix(len(lengths), matrix.k, indptr, indices, data)


def lengths_of_block_rows(matrix: SparseMatrix) -> dict[tuple[int, int], NDArray[np.int64]]:
    """Return the blocks with a nonzero in each block row, by the (rows, cols) of a block, for all SIDES.

    Coarser blocks are counted from the finest, of which there are fewer than nonzeros.
    """
    least = SIDES[0]
    wide = ceil_div(matrix.k, least)
    row, column = np.divmod(_distinct(_keys(matrix, least, least), ceil_div(matrix.m, least) * wide), wide)
    found = {}
    for rows in SIDES:
        block_rows = ceil_div(matrix.m, rows)
        for cols in SIDES:
            block_columns = ceil_div(matrix.k, cols)
            keys = row // (rows // least) * block_columns + column // (cols // least)
            distinct = _distinct(keys, block_rows * block_columns)
            found[rows, cols] = np.bincount(distinct // block_columns, minlength=block_rows)
    return found


def fills(matrix: SparseMatrix, lengths: Mapping[tuple[int, int], NDArray[np.int64]]) -> dict[tuple[int, int], float]:
    """Return the share of nonzero elements in the blocks of each size; 0 without nonzeros."""
    return {
        (rows, cols): matrix.nnz / max(1, int(counts.sum()) * rows * cols) for (rows, cols), counts in lengths.items()
    }


def _distinct(keys: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the distinct ``keys``, ascending, all below ``count``; by marks if those fit."""
    if count > MAX_MARKS:
        return np.unique(keys)
    marks = np.zeros(count, dtype=bool)
    marks[keys] = True
    return np.flatnonzero(marks)


def blocks_of(matrix: SparseMatrix, rows: int, cols: int) -> Blocks:
    """Return the blocks of ``rows`` x ``cols`` with a nonzero."""
    wide = ceil_div(matrix.k, cols)
    keys = _distinct(_keys(matrix, rows, cols), ceil_div(matrix.m, rows) * wide)
    counts = np.bincount(keys // wide, minlength=ceil_div(matrix.m, rows))
    return Blocks(np.concatenate(([0], np.cumsum(counts))).astype(np.int64), keys % wide, keys)


def dense_blocks(
    matrix: SparseMatrix, values: NDArray[np.float32], blocks: Blocks, rows: int, cols: int
) -> NDArray[np.float32]:
    """Return the blocks' elements (blocks, rows, cols), with ``values`` as the matrix's nonzeros."""
    found = np.zeros((len(blocks.keys), rows, cols), dtype=np.float32)
    place = np.searchsorted(blocks.keys, _keys(matrix, rows, cols))
    found[place, matrix.rows_of_nonzeros() % rows, matrix.indices % cols] = values
    return found


def _keys(matrix: SparseMatrix, rows: int, cols: int) -> NDArray[np.int64]:
    return matrix.rows_of_nonzeros() // rows * np.int64(ceil_div(matrix.k, cols)) + matrix.indices // cols
