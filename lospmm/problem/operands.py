"""Random B and residual that a kernel is verified with."""

import numpy as np
from numpy.typing import NDArray

from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.dtype import FLOAT32, Dtype
from lospmm.problem.problem import Problem


def draw_b(matrix: SparseMatrix, columns: int, seed: int, dtype: Dtype = FLOAT32) -> NDArray[np.float32]:
    """B (k, columns), as it lies in memory: uniform between -1 and 1, or smaller (``exponent_of_b``)."""
    b = np.random.default_rng(seed).uniform(-1.0, 1.0, size=(matrix.k, columns))
    return _stored(dtype, np.ldexp(b, exponent_of_b(matrix, dtype)).astype(np.float32))


def exponent_of_b(matrix: SparseMatrix, dtype: Dtype) -> int:
    """Of the power of two that B is scaled by where A is so large that an element of C could overflow; else 0."""
    sums = np.bincount(matrix.rows_of_nonzeros(), weights=np.abs(matrix.data.astype(np.float64)), minlength=matrix.m)
    return min(0, dtype.max_exponent - int(np.frexp(sums.max())[1]))


def _stored(dtype: Dtype, elements: NDArray[np.float32]) -> NDArray[np.float32]:
    return dtype.from_storage(dtype.to_storage(elements))


def draw_residual(problem: Problem, columns: int, seed: int) -> NDArray[np.float32] | None:
    """The residual (m, columns), uniform between -1 and 1, where the kernel takes one."""
    if not problem.epilogue.residual:
        return None
    random = np.random.default_rng((seed, 1))
    drawn = random.uniform(-1.0, 1.0, size=(problem.matrix.m, columns)).astype(np.float32)
    return _stored(problem.dtype, drawn)
