"""The other half of tensor_core: row blocks of A on the warpgroups of sm_90a, zeros included, for TF32 and float32.

A block of threads has ``rows`` rows of A and 64 columns of C for each of its warpgroups. Only columns of A without a
nonzero in these rows are left out, so this is for matrices that are not very sparse. What it gains over the vendor's
product is that weights are known: they are laid out, and of float32 split into two TF32 numbers, when they are packed.
Three products of TF32 numbers are as exact as float32, and faster than the vendor's (docs/decisions/0027).
"""

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from lospmm.dtype import Dtype
from lospmm.families.lists import MAX_GRID_SIDE
from lospmm.families.panels import numbered_rows
from lospmm.families.traffic import LAUNCH_MICROS
from lospmm.matrix import SparseMatrix
from lospmm.model import Launch, Problem, ceil_div
from lospmm.packed import PackedKernel, pack, source_of_template

ROWS = (64, 96, 128, 192, 256)
GROUPS = (1, 2, 3)
DEPTHS = (16, 32)

#: Blocks that an SM holds, by their shared memory and their registers.
BLOCKS = (1, 2)

#: A ring of more stages waits for nothing any sooner, one of fewer has nothing on its way.
LEAST_STAGES, MOST_STAGES = 2, 8

#: Cells of A that are written out, in 4 or 8 bytes each.
MAX_CELLS = 2**24

#: Of the tensor cores' rate; bytes from the L2 cache and elements of C in a cycle and SM; cycles of a block from one
#: chunk to the next, and before its first and after its last. Fitted to 464 plans on an H200, which they miss by 12 %.
MULTIPLYING_SHARE, COPIED_BYTES_PER_CYCLE, STORED_PER_CYCLE = 0.74, 38.5, 8.4
CHUNK_CYCLES, BLOCK_CYCLES = 59.0, 3400.0

#: The one architecture that has such instructions.
ARCH = 90

_COLUMNS, _WARPGROUP, _BARRIER_BYTES, _PADDING = 64, 128, 8, 8

#: Registers of a thread beside sums and factors (measured with ptxas 13.0).
_OTHER_REGISTERS = 30


@dataclass(frozen=True, slots=True)
class Warpgroups:
    """A plan."""

    rows: int  # of A, of a block
    groups: int  # warpgroups of a block, 64 columns of C each
    depth: int  # columns of A at a time
    blocks: int  # of an SM

    @property
    def cols(self) -> int:
        return _COLUMNS * self.groups

    @property
    def threads(self) -> int:
        """One warpgroup more copies for the others."""
        return _WARPGROUP * (self.groups + 1)


def refusal(problem: Problem) -> str | None:
    if problem.dtype.is_16_bit:
        return f"{problem.dtype.name}: its elements are no TF32 numbers"
    if problem.device.arch_number != ARCH:
        return f"{problem.device.arch} has no warpgroups' products"
    if problem.n % 4:
        return f"n {problem.n} is no multiple of 4: rows of B cannot be copied in bulk"
    if problem.matrix.m * problem.matrix.k > MAX_CELLS:
        return f"more than {MAX_CELLS} cells"
    return None


def plans(problem: Problem) -> list[Warpgroups]:
    """What fits an SM; no block that is half empty, but of the smallest."""
    device, m, n = problem.device, problem.matrix.m, problem.n
    listed = (Warpgroups(*axes) for axes in product(ROWS, GROUPS, DEPTHS, BLOCKS))
    return [
        plan
        for plan in listed
        if (plan.rows == min(ROWS) or m > plan.rows // 2)
        and (plan.groups == 1 or n > plan.cols - _COLUMNS)
        and plan.blocks * plan.threads <= device.threads_per_sm
        and registers_needed(plan, problem.dtype) <= registers_allowed(plan, problem)
        and stages_of(plan, problem) >= LEAST_STAGES
        and ceil_div(m, plan.rows) <= MAX_GRID_SIDE
    ]


def _stage_bytes(plan: Warpgroups, dtype: Dtype) -> int:
    floats = plan.depth * (plan.cols + _PADDING + dtype.parts * plan.rows)
    return 4 * floats + 2 * _BARRIER_BYTES


def stages_of(plan: Warpgroups, problem: Problem) -> int:
    """Of the ring: as many as an SM has room for."""
    device = problem.device
    shared_bytes = device.shared_bytes_per_sm // plan.blocks - device.reserved_shared_bytes
    return min(MOST_STAGES, min(device.shared_bytes_per_block, shared_bytes) // _stage_bytes(plan, problem.dtype))


def registers_allowed(plan: Warpgroups, problem: Problem) -> int:
    """Of a thread: a block's are those of whole warpgroups."""
    return min(255, problem.device.registers_per_sm // (plan.blocks * plan.threads) // 8 * 8)


def registers_needed(plan: Warpgroups, dtype: Dtype) -> int:
    """A forecast, of a thread: sums, of float32 those of all products too, factors, addresses. With fewer, ptxas has
    each product wait for the one before."""
    return dtype.parts * (plan.rows // 2 + 4) + _OTHER_REGISTERS


def micros(problem: Problem, plan: Warpgroups) -> float:
    """A forecast: of a block what its tensor cores multiply or what it copies, whichever takes longer, the way from
    chunk to chunk, a beginning and an end."""
    device, matrix = problem.device, problem.matrix
    split = problem.dtype.parts
    chunks = ceil_div(round(_columns_of_a_block(matrix, plan.rows)), plan.depth)
    steps = chunks * plan.depth / 8
    multiplied = steps * plan.groups * plan.rows / 2 * (2 * split - 1) / MULTIPLYING_SHARE
    copied = steps * 32 * (plan.cols + split * plan.rows) / COPIED_BYTES_PER_CYCLE
    others = chunks * CHUNK_CYCLES + plan.rows * plan.cols / STORED_PER_CYCLE + BLOCK_CYCLES
    waves = ceil_div(ceil_div(matrix.m, plan.rows) * ceil_div(problem.n, plan.cols), device.sms) / plan.blocks
    cycles = math.ceil(waves) * (min(plan.blocks, math.ceil(plan.blocks * waves)) * max(multiplied, copied) + others)
    memory = 4 * problem.n * (matrix.k + matrix.m) / device.memory_bandwidth
    return LAUNCH_MICROS + 1e6 * max(cycles / device.clock_hz, memory)


def _columns_of_a_block(matrix: SparseMatrix, rows: int) -> float:
    """With a nonzero in a row of a block, if these were anywhere."""
    return float(matrix.k * (1 - (1 - matrix.nnz / max(1, matrix.m * matrix.k)) ** rows))


def pack_plan(problem: Problem, plan: Warpgroups) -> PackedKernel:
    matrix, dtype, epilogue = problem.matrix, problem.dtype, problem.epilogue
    blocks = ceil_div(matrix.m, plan.rows)
    rows = np.full(blocks * plan.rows, -1, dtype=np.int32)
    rows[: matrix.m] = np.arange(matrix.m)
    is_listed = numbered_rows(matrix)[1]
    starts, columns, weights = _chunks(matrix, plan, is_listed)
    stages = stages_of(plan, problem)
    settings = {
        "ROWS": plan.rows,
        "GROUPS": plan.groups,
        "DEPTH": plan.depth,
        "STAGES": stages,
        "LISTED": int(is_listed),
        "LOSPMM_BULK": 1,
    }
    return PackedKernel(
        entry="lospmm_warpgroups",
        source=source_of_template("warpgroups", settings, dtype=dtype, epilogue=epilogue, parts=("wgmma.cuh",)),
        data=pack(
            (problem.n, matrix.k),
            (rows, starts, columns, np.concatenate(dtype.in_parts(weights), axis=1)),
            epilogue=epilogue,
        ),
        launch=Launch((ceil_div(problem.n, plan.cols), blocks, 1), plan.threads, stages * _stage_bytes(plan, dtype)),
        registers=registers_allowed(plan, problem),
        cols=plan.cols,
        dtype=dtype,
        takes_residual=epilogue.residual,
        is_specific=True,
    )


def _chunks(
    matrix: SparseMatrix, plan: Warpgroups, is_listed: bool
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """The first chunk of each block, and the columns (chunks, depth) and weights of each chunk, as 8 x 4 pieces.

    All columns of A, or of each block those with a nonzero in its rows. What a last chunk lacks is k, a column that
    there is not.
    """
    starts, columns, weights = [0], [np.zeros(0, np.int32)], []
    for first in range(0, matrix.m, plan.rows):
        begin, end = matrix.indptr[first], matrix.indptr[min(first + plan.rows, matrix.m)]
        indices = matrix.indices[begin:end]
        is_needed = np.bincount(indices, minlength=matrix.k) >= is_listed
        needed, place = np.flatnonzero(is_needed), np.cumsum(is_needed) - 1
        chunks = ceil_div(len(needed), plan.depth)
        of_block = np.full(chunks * plan.depth, matrix.k, dtype=np.int32)
        of_block[: len(needed)] = needed
        dense = np.zeros((plan.rows, len(of_block)), dtype=np.float32)
        row = np.repeat(np.arange(min(plan.rows, matrix.m - first)), matrix.row_nnz[first : first + plan.rows])
        dense[row, place[indices]] = matrix.data[begin:end]
        pieces = dense.reshape(plan.rows // 8, 8, chunks, plan.depth // 8, 2, 4).transpose(2, 3, 0, 4, 1, 5)
        starts.append(starts[-1] + chunks)
        columns.append(of_block)
        weights.append(pieces.reshape(chunks, plan.rows * plan.depth))
    return (
        np.array(starts, dtype=np.int32),
        np.concatenate(columns[: None if is_listed else 1]),
        np.concatenate(weights),
    )
