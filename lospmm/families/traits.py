"""Traits of a product, by which a family is chosen: a few numbers that take milliseconds to compute.

Scorch's idea: formats are chosen by rules and learned costs, not by trying them. Traits of a large matrix are those
of a sample of its rows, drawn with a fixed seed: the same matrix has the same traits.
"""

from dataclasses import dataclass

import numpy as np

from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.problem import Problem

#: Side of the blocks whose density is computed.
BLOCK = 16

#: Rows of blocks are drawn until they hold about so many nonzeros.
SAMPLED_NONZEROS = 100_000


@dataclass(frozen=True, slots=True)
class Traits:
    """The traits of a product."""

    m: int
    k: int
    n: int
    nnz: int
    element_bytes: int
    is_exact: bool  # float32 arithmetic
    filled_rows: float  # the share of rows with nonzeros
    longest_row: float  # over the mean of those
    block_fill: float  # of 16 x 16 blocks with a nonzero, the share of elements that are nonzero
    is_streamed: bool = False  # A comes from memory at every launch, as in a model that no cache holds


def traits_of(problem: Problem, *, is_streamed: bool = False) -> Traits:
    """Return the traits of a product."""
    matrix, dtype = problem.matrix, problem.dtype
    lengths = matrix.row_nnz
    filled = int(np.count_nonzero(lengths))
    mean = matrix.nnz / filled if filled else 1.0
    return Traits(
        m=matrix.m,
        k=matrix.k,
        n=problem.n,
        nnz=matrix.nnz,
        element_bytes=dtype.element_bytes,
        is_exact=dtype.name == "float32",
        filled_rows=filled / matrix.m,
        longest_row=float(lengths.max(initial=0)) / mean,
        block_fill=_block_fill(matrix),
        is_streamed=is_streamed,
    )


def _block_fill(matrix: SparseMatrix) -> float:
    """Return the density of 16 x 16 blocks with a nonzero; 0 without nonzeros."""
    if not matrix.nnz:
        return 0.0
    rows = -(-matrix.m // BLOCK)
    count = max(1, min(rows, round(rows * SAMPLED_NONZEROS / matrix.nnz)))
    drawn = np.arange(rows) if count == rows else np.sort(np.random.default_rng(0).choice(rows, count, replace=False))
    nonzeros, blocks = 0, 0
    for row in drawn.tolist():
        start, end = int(matrix.indptr[row * BLOCK]), int(matrix.indptr[min((row + 1) * BLOCK, matrix.m)])
        nonzeros += end - start
        blocks += int(np.count_nonzero(np.bincount(matrix.indices[start:end] // BLOCK)))
    return float(nonzeros / (blocks * BLOCK * BLOCK)) if blocks else 0.0
