"""Random B and residual for the verification of a kernel."""

import numpy as np
from numpy.typing import NDArray

from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.dtype import FLOAT32, Dtype
from lospmm.problem.problem import Problem


def draw_b(matrix: SparseMatrix, columns: int, seed: int, dtype: Dtype = FLOAT32) -> NDArray[np.float32]:
    """Draw B (k, columns), rounded as it is stored: uniform in [-1, 1], or scaled by ``exponent_of_b``."""
    b = np.random.default_rng(seed).uniform(-1.0, 1.0, size=(matrix.k, columns))
    return dtype.from_storage(dtype.to_storage(np.ldexp(b, exponent_of_b(matrix, dtype)).astype(np.float32)))


def exponent_of_b(matrix: SparseMatrix, dtype: Dtype) -> int:
    """Return the exponent of 2 by which B is scaled down so that no element of C overflows; else 0."""
    if matrix.largest * matrix.row_nnz.max(initial=0) < 2.0**dtype.max_exponent:
        return 0
    sums = np.bincount(matrix.rows_of_nonzeros(), weights=np.abs(matrix.data.astype(np.float64)), minlength=matrix.m)
    return min(0, dtype.max_exponent - int(np.frexp(sums.max())[1]))


def draw_residual(problem: Problem, columns: int, seed: int) -> NDArray[np.float32] | None:
    """Draw the residual (m, columns), uniform in [-1, 1], or return None if the kernel takes none."""
    if not problem.epilogue.residual:
        return None
    random = np.random.default_rng((seed, 1))
    drawn = random.uniform(-1.0, 1.0, size=(problem.matrix.m, columns)).astype(np.float32)
    return problem.dtype.from_storage(problem.dtype.to_storage(drawn))
