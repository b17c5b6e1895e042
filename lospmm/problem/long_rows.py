"""How many products a float32 sum adds up one after another before it is set aside: what keeps a layer's error small.

Each of the n additions of a chain rounds by at most u = 2^-24 of what it has by then, at random by 0.42 u of it (the
root of the mean square, for mantissas drawn evenly on a logarithmic scale). With products drawn around zero the sum so
far is a random walk, so that errors add up to about 0.42 u sqrt(n / 2) |a| |b|, where the element itself has |a| |b|.
Rows that are longer than ``chain_limits`` allows are added up in parts of equal length, each from zero, and the parts
are added: a chain of l products in n / l parts leaves sqrt(l / 2) of the above. docs/accuracy.md has the bound.

A long row takes a second accumulator. Where a few of a matrix are long, as in layers that are pruned by what they
learn, that costs next to nothing. Where all are, tiles would have half the rows: there each row stays one chain.
"""

import numpy as np
from numpy.typing import NDArray

from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.dtype import FLOAT32, Dtype

#: Products of a chain in the row of the greatest norm. The greatest error of three million elements is then 0.7e-6 of
#: the greatest element, and beyond 1e-6 in a few layers of a hundred whose rows all have chains of that length
#: (docs/accuracy.md). Fewer would be more exact, and take registers from layers that are exact enough.
PRODUCTS = 256

#: Of the rows of a matrix, those that may be long at most: with more, none counts as long.
SHARE = 0.25


def chain_limits(matrix: SparseMatrix, dtype: Dtype, split_k: int = 1) -> NDArray[np.float64]:
    """Of each row of A, the products that a chain of it may have, (m,): infinite where it need not be cut.

    Where ``split_k`` blocks share a tile, a row is in as many chains already.
    """
    allowed = allowed_products(matrix, dtype)
    allowed[~are_long(matrix, allowed, split_k)] = np.inf
    return allowed


def are_long(matrix: SparseMatrix, allowed: NDArray[np.float64], split_k: int) -> NDArray[np.bool_]:
    """Which rows have more products in the chains of ``split_k`` blocks than are ``allowed``, (m,); none where more
    than SHARE of them have."""
    found: NDArray[np.bool_] = matrix.row_nnz > split_k * allowed
    return found if found.mean() <= SHARE else np.zeros_like(found)


def allowed_products(matrix: SparseMatrix, dtype: Dtype) -> NDArray[np.float64]:
    """The same whether a row has as many products or not; all infinite where none has.

    A row of a smaller norm may have as many more as keep its error what it is in the row of the greatest norm. Of other
    types than float32 the factors are rounded by far more than sums are.
    """
    allowed = np.full(matrix.m, np.inf)
    if dtype.name == FLOAT32.name and matrix.row_nnz.max() > PRODUCTS:  # none is allowed fewer
        squares = np.bincount(matrix.rows_of_nonzeros(), matrix.data.astype(np.float64) ** 2, minlength=matrix.m)
        np.divide(PRODUCTS * squares.max(), squares, out=allowed, where=squares > 0)
    return allowed
