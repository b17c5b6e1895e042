"""Dense blocks that cover a sparse matrix: how full they are at each size, and their numbers."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.matrix import SparseMatrix
from lospmm.model import ceil_div

#: Sides of blocks. The least is the tensor cores' (rows of A of an instruction).
SIDES = (8, 16, 32, 64)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The blocks of ``rows`` x ``cols`` that hold a nonzero, by block row and then by block column."""

    indptr: NDArray[np.int64]  # (block rows + 1,)
    columns: NDArray[np.int64]  # (blocks,), block columns
    keys: NDArray[np.int64]  # (blocks,): block row x block columns + block column, ascending


def fills(matrix: SparseMatrix) -> dict[tuple[int, int], float]:
    """The share of nonzeros in the blocks of each size, by (rows, cols); of no nonzero it is 0.

    Coarser blocks are counted from the finest, of which there are fewer than nonzeros.
    """
    least = SIDES[0]
    wide = ceil_div(matrix.k, least)
    keys = np.unique(matrix.rows_of_nonzeros() // least * np.int64(wide) + matrix.indices // least)
    found = {}
    for rows in SIDES:
        for cols in SIDES:
            coarse = keys // wide // (rows // least) * wide + keys % wide // (cols // least)
            count = len(keys) if rows == cols == least else len(np.unique(coarse))
            found[rows, cols] = matrix.nnz / max(1, count * rows * cols)
    return found


def blocks_of(matrix: SparseMatrix, rows: int, cols: int) -> Blocks:
    wide = ceil_div(matrix.k, cols)
    keys = np.unique(_keys(matrix, rows, cols))
    counts = np.bincount(keys // wide, minlength=ceil_div(matrix.m, rows))
    return Blocks(np.concatenate(([0], np.cumsum(counts))).astype(np.int64), keys % wide, keys)


def dense_blocks(
    matrix: SparseMatrix, values: NDArray[np.float32], blocks: Blocks, rows: int, cols: int
) -> NDArray[np.float32]:
    """(blocks, rows, cols), of the matrix with ``values`` in the places of its nonzeros."""
    found = np.zeros((len(blocks.keys), rows, cols), dtype=np.float32)
    place = np.searchsorted(blocks.keys, _keys(matrix, rows, cols))
    found[place, matrix.rows_of_nonzeros() % rows, matrix.indices % cols] = values
    return found


def _keys(matrix: SparseMatrix, rows: int, cols: int) -> NDArray[np.int64]:
    return matrix.rows_of_nonzeros() // rows * np.int64(ceil_div(matrix.k, cols)) + matrix.indices // cols
