"""Verification of a kernel: some columns of its result, with the epilogue, against float64.

The largest error of an element is the ``Tolerance`` of the problem's type (``lospmm/problem/accuracy.py``). Errors
are reported relative to (|A| |B|): relative to the element itself they would have no bound, since a sum may cancel. A
bias and a residual are terms of that sum; ReLU never increases the difference of two numbers.
"""

import numpy as np
from numpy.typing import NDArray

from lospmm.artifact.manifest import Verified
from lospmm.codegen.emission import Emission
from lospmm.codegen.ir import KernelProgram
from lospmm.cpu import execute
from lospmm.cpu.block import execute_packed
from lospmm.cpu.geometry import Run, geometry_of
from lospmm.cpu.reference import compare
from lospmm.errors import Unsupported
from lospmm.families.packed import PackedKernel
from lospmm.problem.convolution import Convolution, guard_bits, outside
from lospmm.problem.operands import draw_b, draw_residual
from lospmm.problem.problem import Problem, ceil_div
from lospmm.stages import Count, silent

#: The most columns of C that are computed, and how many at each end of a column block.
MAX_COLUMNS = 64

EDGE_COLUMNS = 10

#: Elements of B and C together that are computed at a time: a few hundred megabytes in float64.
MAX_ELEMENTS = 1 << 24

#: Elements of B and C together that a packed kernel is run on: it takes them whole, several gigabytes in all.
MAX_PACKED_ELEMENTS = 1 << 28

#: Threads per block where the kernel leaves them to its launch: any number must do.
LAUNCH_COLS = 64


def verify_on_cpu(
    problem: Problem, program: KernelProgram, emission: Emission, *, seed: int = 0, progress: Count = silent
) -> Verified:
    """Run the emission's text on the CPU for some columns. Raises VerificationFailed."""
    geometry = geometry_of(program, cols=LAUNCH_COLS)
    words = geometry.together(choose_columns(geometry.n, geometry.cols, _column_limit(problem)))
    columns = geometry.columns_of(words)
    b = draw_b(problem.matrix, len(columns), seed, problem.dtype)
    residual = draw_residual(problem, len(columns), seed)
    given = b if problem.convolution is None else pad(problem.convolution, b, columns, np.nan)
    held_to = b if problem.convolution is None else pad(problem.convolution, b, columns, 0.0)
    # Behind a ragged end there are threads without a column; the last of them runs too, and must touch nothing.
    last_thread = ceil_div(geometry.n, geometry.cols) * geometry.cols - 1
    idle = np.arange(max(last_thread, geometry.n), last_thread + 1) if geometry.walks == 1 else words[:0]
    every, more = np.concatenate((words, idle)), len(geometry.columns_of(idle))
    third = None if residual is None else _with_nan(residual, more)
    c = execute(emission, Run(geometry, every, _with_nan(given, more), third, progress))
    error = compare(problem, columns, held_to, c[:, : len(columns)], residual)
    return Verified("cpu", error, len(columns))


def verify_packed_on_cpu(
    problem: Problem, kernel: PackedKernel, *, seed: int = 0, progress: Count = silent
) -> Verified:
    """Run blocks of a packed kernel's text on the CPU: of the first, a middle and the last columns.

    B has NaN in the columns of other blocks. Raises VerificationFailed, and Unsupported for a B and C beyond
    MAX_PACKED_ELEMENTS.
    """
    matrix, n = problem.matrix, problem.n
    if (matrix.m + matrix.k) * n > MAX_PACKED_ELEMENTS:
        raise Unsupported(
            f"verify cpu: B and C have {(matrix.m + matrix.k) * n} elements, over the {MAX_PACKED_ELEMENTS} that a CPU "
            "runs such a kernel on; tune on a machine with the GPU, or with --verify none, or for fewer columns"
        )
    last = ceil_div(n, kernel.cols) - 1
    columns = np.flatnonzero(np.isin(np.arange(n) // kernel.cols, (0, last // 2, last)))
    b = np.full((matrix.k, n), np.nan, dtype=np.float32)
    b[:, columns] = draw_b(matrix, len(columns), seed, problem.dtype)
    residual = None
    if (drawn := draw_residual(problem, len(columns), seed)) is not None:
        residual = np.full((matrix.m, n), np.nan, dtype=np.float32)
        residual[:, columns] = drawn
    c = execute_packed(kernel, columns, b, m=matrix.m, residual=residual, progress=progress)
    step = _column_limit(problem)
    pieces = (columns[start : start + step] for start in range(0, len(columns), step))
    errors = [
        compare(problem, own, b[:, own], c[:, own], None if residual is None else residual[:, own]) for own in pieces
    ]
    return Verified("cpu", max(errors), len(columns))


def _with_nan(columns: NDArray[np.float32], more: int) -> NDArray[np.float32]:
    return np.hstack((columns, np.full((len(columns), more), np.nan, dtype=np.float32)))


def _column_limit(problem: Problem) -> int:
    """Return the most columns to compute: fewer if columns of B and C are so long as to take gigabytes."""
    return min(MAX_COLUMNS, max(6, MAX_ELEMENTS // (problem.matrix.m + problem.matrix.k)))


def choose_columns(n: int, cols: int, limit: int = MAX_COLUMNS) -> NDArray[np.int64]:
    """Return all columns of C, or those at both ends of the first, a middle and the last block; ascending.

    ``cols`` are a block's columns. Returns at most ``limit`` columns, which is 6 or more.
    """
    if n <= limit:
        return np.arange(n)
    last = ceil_div(n, cols) - 1
    starts = cols * np.array([0, last // 2, last])
    ends = np.minimum(starts + cols, n)
    edge = np.arange(min(EDGE_COLUMNS, limit // 6))
    near = np.concatenate((np.add.outer(starts, edge), np.subtract.outer(ends - 1, edge)))
    return np.unique(np.clip(near, 0, n - 1))


def pad(
    convolution: Convolution, b: NDArray[np.float32], columns: NDArray[np.int64], padding: float
) -> NDArray[np.float32]:
    """Return ``b`` (k, columns) with ``padding`` where a window reaches beyond its input."""
    guards = guard_bits(convolution, np.arange(convolution.k))
    return np.where(guards[:, np.newaxis] & outside(convolution, columns) != 0, np.float32(padding), b)
