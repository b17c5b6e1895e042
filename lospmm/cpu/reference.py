"""Reference in float64: A x B with the epilogue, and the error of a result."""

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.ir import describe_rows
from lospmm.errors import VerificationFailed
from lospmm.problem.accuracy import SMALLEST_NORMAL, off_by, tolerance_of, weights_held_to
from lospmm.problem.epilogue import bias_of
from lospmm.problem.problem import Problem

#: Rows that a message names.
NAMED_ROWS = 20


def compare(
    problem: Problem,
    columns: NDArray[np.int64],
    b: NDArray[np.float32],
    c: NDArray[np.float32],
    residual: NDArray[np.float32] | None = None,
) -> float:
    """Return the greatest error of ``c`` (m, columns) as A x ``b`` with the epilogue, relative to |A| |B|.

    ``columns`` are their numbers, for messages. ``b`` and ``residual`` are what they are in memory. An element
    without a term must be zero.

    Raises VerificationFailed beyond the tolerance of the problem's type, or for NaN, which stands where nothing was
    written.
    """
    matrix, epilogue = problem.matrix, problem.epilogue
    unwritten = np.flatnonzero(np.isnan(c).any(axis=1))
    if len(unwritten):
        more = f" and {len(unwritten) - NAMED_ROWS} more" if len(unwritten) > NAMED_ROWS else ""
        raise VerificationFailed(f"rows never written: {describe_rows(unwritten[:NAMED_ROWS].tolist())}{more}")
    a, exact_b = matrix.to_scipy().astype(np.float64), b.astype(np.float64)
    a.data = weights_held_to(problem.dtype, matrix, problem.values).astype(np.float64)
    expected, scale, squares = a @ exact_b, abs(a) @ abs(exact_b), a.power(2) @ exact_b**2
    added = np.zeros(c.shape) if residual is None else residual.astype(np.float64)
    for term in (added, bias_of(epilogue, np.arange(matrix.m)).astype(np.float64)[:, np.newaxis]):
        expected, scale = expected + term, scale + abs(term)
    if epilogue.relu:
        expected = np.maximum(expected, 0)
    tolerance = tolerance_of(problem.dtype, problem.rounded_sums)
    off, allowed = np.abs(c - expected), tolerance.allowed(scale, squares, expected)
    ratio = off / allowed
    ratio[(scale == 0) & (c != 0)] = np.inf
    worst = int(ratio.argmax())
    row, position = divmod(worst, c.shape[1])
    if ratio.flat[worst] > 1:
        raise VerificationFailed(
            f"row {row}, column {columns[position]}: got {c.flat[worst]}, expected {expected.flat[worst]} "
            f"({off_by(off.flat[worst], scale.flat[worst], allowed.flat[worst])})"
        )
    return float((off / np.maximum(scale, SMALLEST_NORMAL)).max())
