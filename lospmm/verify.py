"""Whether a kernel computes A x B, with what its epilogue adds: some columns of its result against float64.

Every multiply-add rounds once, so a result of q of them is wrong by at most about q u (|A| |B|) with u = 2^-24,
element by element (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1), and for values drawn around
zero by a few u. So errors are taken relative to (|A| |B|): relative to the element itself they would have no
bound, since a sum may cancel. A bias and a residual are terms of that sum; ReLU brings no two numbers further apart.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.emission import Emission
from lospmm.codegen.units import describe_rows
from lospmm.convolution import Convolution, guard_bits, outside
from lospmm.epilogue import PLAIN, Epilogue, bias_of
from lospmm.errors import VerificationFailed
from lospmm.ir import KernelProgram
from lospmm.matrix import SparseMatrix
from lospmm.model import Problem, ceil_div
from lospmm.packed import PackedKernel
from lospmm.runtime import execute
from lospmm.runtime.block import execute_packed
from lospmm.runtime.geometry import geometry_of

#: Some 160 u: far above the rounding of any sum, far below what a wrong weight or a missing term does.
MAX_RELATIVE_ERROR = 1e-5

#: The most columns of C that are computed, and how many at each end of a column block.
MAX_COLUMNS = 64
EDGE_COLUMNS = 10

#: Elements of B and C together that are computed at a time: a few hundred megabytes in float64.
MAX_ELEMENTS = 1 << 24

#: Threads per block where the kernel leaves them to its launch: any number must do.
LAUNCH_COLS = 64

#: Rows that a message names.
NAMED_ROWS = 20

_SMALLEST_NORMAL = float(np.finfo(np.float32).smallest_normal)


@dataclass(frozen=True, slots=True)
class Verification:
    on: Literal["cpu", "gpu"]
    max_relative_error: float  # over the elements that were computed
    columns: int  # of C, that were computed


def verify_on_cpu(problem: Problem, program: KernelProgram, emission: Emission, *, seed: int = 0) -> Verification:
    """Run the emission's text on the CPU for some columns. Raises VerificationFailed."""
    geometry = geometry_of(program, n=problem.n, cols=LAUNCH_COLS)
    columns = choose_columns(geometry.n, geometry.cols, _column_limit(problem.matrix))
    b = draw_b(problem.matrix, len(columns), seed)
    residual = draw_residual(problem, len(columns), seed)
    given = b if problem.convolution is None else pad(problem.convolution, b, columns, np.nan)
    held_to = b if problem.convolution is None else pad(problem.convolution, b, columns, 0.0)
    # Behind a ragged end there are threads without a column; the last of them runs too, and must touch nothing.
    last_thread = ceil_div(geometry.n, geometry.cols) * geometry.cols - 1
    idle = np.arange(max(last_thread, geometry.n), last_thread + 1)
    every = np.concatenate((columns, idle))
    third = None if residual is None else _with_nan(residual, len(idle))
    c = execute(emission, geometry, every, _with_nan(given, len(idle)), third)
    error = compare(
        problem.matrix, columns, held_to, c[:, : len(columns)], epilogue=problem.epilogue, residual=residual
    )
    return Verification("cpu", error, len(columns))


def _with_nan(columns: NDArray[np.float32], more: int) -> NDArray[np.float32]:
    return np.hstack((columns, np.full((len(columns), more), np.nan, dtype=np.float32)))


def _column_limit(matrix: SparseMatrix) -> int:
    """Fewer columns where B and C are so long that even some columns of them take gigabytes."""
    return min(MAX_COLUMNS, max(6, MAX_ELEMENTS // (matrix.m + matrix.k)))


def choose_columns(n: int, cols: int, limit: int = MAX_COLUMNS) -> NDArray[np.int64]:
    """All columns of C, or the first and the last of the first, a middle and the last block of ``cols``; ascending.

    At most ``limit``, 6 or more.
    """
    if n <= limit:
        return np.arange(n)
    last = ceil_div(n, cols) - 1
    starts = cols * np.array([0, last // 2, last])
    ends = np.minimum(starts + cols, n)
    edge = np.arange(min(EDGE_COLUMNS, limit // 6))
    near = np.concatenate((np.add.outer(starts, edge), np.subtract.outer(ends - 1, edge)))
    return np.unique(np.clip(near, 0, n - 1))


def draw_b(matrix: SparseMatrix, columns: int, seed: int) -> NDArray[np.float32]:
    """B (k, columns), uniform between -1 and 1, or smaller where A is so large that a sum could overflow."""
    b = np.random.default_rng(seed).uniform(-1.0, 1.0, size=(matrix.k, columns))
    _, exponent = np.frexp(abs(matrix.to_scipy().astype(np.float64)).sum(axis=1).max())
    return np.ldexp(b, min(0, 127 - int(exponent))).astype(np.float32)


def draw_residual(problem: Problem, columns: int, seed: int) -> NDArray[np.float32] | None:
    """The residual (m, columns), uniform between -1 and 1, where the kernel takes one."""
    if not problem.epilogue.residual:
        return None
    random = np.random.default_rng((seed, 1))
    return random.uniform(-1.0, 1.0, size=(problem.matrix.m, columns)).astype(np.float32)


def pad(
    convolution: Convolution, b: NDArray[np.float32], columns: NDArray[np.int64], padding: float
) -> NDArray[np.float32]:
    """``b`` (k, columns) with ``padding`` where a window reaches beyond its input."""
    guards = guard_bits(convolution, np.arange(convolution.k))
    return np.where(guards[:, np.newaxis] & outside(convolution, columns) != 0, np.float32(padding), b)


def compare(
    matrix: SparseMatrix,
    columns: NDArray[np.int64],
    b: NDArray[np.float32],
    c: NDArray[np.float32],
    *,
    epilogue: Epilogue = PLAIN,
    residual: NDArray[np.float32] | None = None,
) -> float:
    """The greatest relative error of ``c`` (m, columns) as A x ``b``; ``columns`` are their numbers, for messages.

    An element without a term must be zero. Raises VerificationFailed beyond MAX_RELATIVE_ERROR, or for NaN, which
    stands where nothing was written.
    """
    unwritten = np.flatnonzero(np.isnan(c).any(axis=1))
    if len(unwritten):
        more = f" and {len(unwritten) - NAMED_ROWS} more" if len(unwritten) > NAMED_ROWS else ""
        raise VerificationFailed(f"rows never written: {describe_rows(unwritten[:NAMED_ROWS].tolist())}{more}")
    a, exact_b = matrix.to_scipy().astype(np.float64), b.astype(np.float64)
    expected, scale = a @ exact_b, abs(a) @ abs(exact_b)
    added = np.zeros(c.shape) if residual is None else residual.astype(np.float64)
    for term in (added, bias_of(epilogue, np.arange(matrix.m)).astype(np.float64)[:, np.newaxis]):
        expected, scale = expected + term, scale + abs(term)
    if epilogue.relu:
        expected = np.maximum(expected, 0)
    # Below the normal numbers float32 has a fixed spacing, and so have rounding errors.
    error = np.abs(c - expected) / np.maximum(scale, _SMALLEST_NORMAL)
    error[(scale == 0) & (c != 0)] = np.inf
    worst = int(error.argmax())
    row, position = divmod(worst, c.shape[1])
    if error.flat[worst] > MAX_RELATIVE_ERROR:
        raise VerificationFailed(
            f"row {row}, column {columns[position]}: got {c.flat[worst]}, expected {expected.flat[worst]} "
            f"(relative error {error.flat[worst]:.1e}, at most {MAX_RELATIVE_ERROR:.0e} allowed)"
        )
    return float(error.flat[worst])


def verify_packed_on_cpu(problem: Problem, kernel: PackedKernel, *, seed: int = 0) -> Verification:
    """Run a packed kernel's text on the CPU for the blocks of some columns. Raises VerificationFailed."""
    columns = choose_columns(problem.n, kernel.cols, _column_limit(problem.matrix))
    b = draw_b(problem.matrix, problem.n, seed)
    residual = draw_residual(problem, problem.n, seed)
    c = execute_packed(kernel, columns, b, m=problem.matrix.m, residual=residual)
    third = None if residual is None else residual[:, columns]
    error = compare(problem.matrix, columns, b[:, columns], c[:, columns], epilogue=problem.epilogue, residual=third)
    return Verification("cpu", error, len(columns))
