"""Limits on the length of float32 sums: long rows are summed in parts to keep rounding errors small.

Each of the n additions of a chain rounds by at most u = 2^-24 of the sum so far, at random by 0.42 u of it (the
root of the mean square, for mantissas drawn evenly on a logarithmic scale). With products drawn around zero the sum
so far is a random walk, so that errors add up to about 0.42 u sqrt(n / 2) |a| |b|, where the element itself has |a|
|b|. Rows that are longer than ``chain_limits`` allows are added up in parts of equal length, each from zero, and the
parts are added: a chain of l products in n / l parts leaves sqrt(l / 2) of the above. docs/accuracy.md has the bound.

A long row takes a second accumulator. If only a few rows of a matrix are long, as in layers pruned by learned masks,
that costs next to nothing. If all are, tiles would have half the rows: then each row stays one chain.
"""

import numpy as np
from numpy.typing import NDArray

from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.dtype import FLOAT32, Dtype

#: Products of a chain in the row of the greatest norm. The greatest error of three million elements is then 0.7e-6 of
#: the greatest element, and beyond 1e-6 in a few layers of a hundred whose rows all have chains of that length
#: (docs/accuracy.md). Fewer would be more exact, and take registers from layers that are exact enough.
PRODUCTS = 256

#: The largest share of a matrix's rows that may be long: with more, none counts as long.
SHARE = 0.25


def chain_limits(matrix: SparseMatrix, dtype: Dtype, split_k: int = 1) -> NDArray[np.float64]:
    """Return the most products that one chain of each row of A may have, (m,); infinite: never cut.

    If ``split_k`` blocks share a tile, a row is in as many chains already.
    """
    allowed = allowed_products(matrix, dtype)
    allowed[~are_long(matrix, allowed, split_k)] = np.inf
    return allowed


def are_long(matrix: SparseMatrix, allowed: NDArray[np.float64], split_k: int) -> NDArray[np.bool_]:
    """Return which rows have more products in the chains of ``split_k`` blocks than are ``allowed``, (m,).

    None counts as long if more than SHARE of the rows would.
    """
    found: NDArray[np.bool_] = matrix.row_nnz > split_k * allowed
    return found if found.mean() <= SHARE else np.zeros_like(found)


def allowed_products(matrix: SparseMatrix, dtype: Dtype) -> NDArray[np.float64]:
    """Return the limits of ``chain_limits`` for all rows, long or not; infinite if no row is longer.

    A row of a smaller norm may have more products, as many as give it the error of the row of the greatest norm. In
    types other than float32 the factors are rounded by far more than sums are: there is no limit.
    """
    allowed = np.full(matrix.m, np.inf)
    if dtype.name == FLOAT32.name and matrix.row_nnz.max() > PRODUCTS:  # none is allowed fewer
        squares = np.bincount(matrix.rows_of_nonzeros(), matrix.data.astype(np.float64) ** 2, minlength=matrix.m)
        np.divide(PRODUCTS * squares.max(), squares, out=allowed, where=squares > 0)
    return allowed
