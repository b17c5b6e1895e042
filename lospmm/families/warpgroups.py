"""Part of tensor_core for TF32 and float32: row blocks of A on sm_90a's warpgroups, zeros included.

A block of threads has ``rows`` rows of A and 64 columns of C for each of its warpgroups. Only columns of A without a
nonzero in these rows are left out, so this is for matrices that are not very sparse. It is faster than the vendor's
product because weights are known: they are laid out when they are packed, and a float32 is split into two float16,
three products of which are as exact as float32 (docs/decisions/0032).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lospmm.families.lane import MAX_GRID_SIDE
from lospmm.families.packed import PackedKernel, pack, source_of_template
from lospmm.families.traffic import LAUNCH_MICROS
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem, ceil_div

ROWS = (64, 96, 128, 192, 256)
GROUPS = (1, 2, 3)

#: If a larger share of A's columns is not empty, all rows of B are read in order, which is faster than by a list.
WORTH_LISTING = 0.75

#: Nonzeros per column that are looked at first: if they fill enough columns, the others need not be.
COLUMNS_SEEN = 8

#: Blocks that an SM has at a time.
BLOCKS = (1, 2)

#: The fewest stages of the ring that keep copies in flight, and the most that reduce waits.
LEAST_STAGES, MOST_STAGES = 2, 8

#: The most elements of A, zeros included, 4 bytes each.
MAX_CELLS = 2**24

#: The one architecture that has such instructions.
ARCH = 90

_COLUMNS, _WARPGROUP, _BARRIER_BYTES, _PADDING, _WEIGHT_BYTES = 64, 128, 8, 8, 4

#: Registers of a thread beside sums and factors (measured with ptxas 13.0).
_OTHER_REGISTERS = 30

#: Registers of those that can also hold sums, if two products take turns.
_SHARED_REGISTERS = 18

#: For float32: a row's largest weight is scaled to this exponent (float16 ends at 2^16), elements of B to a smaller one
#: (LARGEST of the template). Two float16 leave a rest of up to 2^-25 before scaling back: the floors of A and of B.
_LARGEST_EXPONENT = 14
_FLOORS = (2.0**-39, 2.0**-35)


class OperandKind(NamedTuple):
    """How numbers of a type are multiplied, and its costs.

    Cycles and rates are of an SM, fitted to timings of ``fitting.tensor_core`` on an H200
    (``fitting.fit_tensor_core``); the error is 15 % for TF32 and 14 % for float32.
    """

    template: str
    copiers: int  # threads that do nothing else
    depths: tuple[int, ...]  # columns of A of a chunk, which is copied at once
    step: int  # columns of A of one product of the tensor cores
    order: tuple[int, ...]  # of these columns
    products: int  # for each pair of numbers
    at_once: tuple[int, ...]  # rows of A of one product
    behind: int  # chunks that a warpgroup may be ahead of another
    multiplying_share: float  # of the tensor cores' rate
    copied_bytes_per_cycle: float  # from the L2 cache
    stored_per_cycle: float  # elements of C
    chunk_cycles: float  # of a block, from one chunk to the next
    block_cycles: float  # before its first and after its last
    own_cycles: tuple[float, float] = (0.0, 0.0)  # of a warpgroup, for a chunk and for each of its columns
    way_cycles: float = 0.0  # latency of a copy
    floors: tuple[float, float] = (0.0, 0.0)  # of A and of B (``accuracy.Accuracy``)


#: By type. Thread t has two neighbouring columns of B, and those rows of each step that equal t modulo 4.
KINDS: Mapping[str, OperandKind] = MappingProxyType(
    {
        "tf32": OperandKind(
            template="warpgroups_tf32",
            copiers=_WARPGROUP,
            depths=(16, 32),
            step=8,
            order=tuple(range(8)),
            products=1,
            at_once=(64, 96, 128),
            behind=0,
            multiplying_share=0.74,
            copied_bytes_per_cycle=38.5,
            stored_per_cycle=8.4,
            chunk_cycles=59.0,
            block_cycles=3400.0,
        ),
        "float32": OperandKind(
            template="warpgroups_float32",
            copiers=0,
            depths=(32, 64),
            step=16,
            order=tuple(quad + 4 * second + 8 * half for half in (0, 1) for quad in range(4) for second in (0, 1)),
            products=3,
            at_once=(32, 48, 64, 96, 128),
            behind=2,
            multiplying_share=0.8,
            copied_bytes_per_cycle=27.3,
            stored_per_cycle=1.67,
            chunk_cycles=0.0,
            block_cycles=657.0,
            own_cycles=(919.0, 2.9),
            way_cycles=2800.0,
            floors=_FLOORS,
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Warpgroups:
    """A plan: rows and warpgroups of a block, depth of chunks, blocks of an SM."""

    rows: int  # of A, of a block
    groups: int  # warpgroups of a block, 64 columns of C each
    depth: int  # columns of A at a time
    blocks: int  # of an SM

    @property
    def cols(self) -> int:
        """Columns of C of a block."""
        return _COLUMNS * self.groups


def refusal(problem: Problem) -> str | None:
    """Return why this part has no kernel for the problem, or None."""
    if problem.device.arch_number != ARCH:
        return f"{problem.device.arch} has no warpgroup instructions (wgmma)"
    if problem.n % 4:
        return f"n {problem.n} is not a multiple of 4: rows of B are copied 16 bytes at a time"
    if problem.matrix.m * problem.matrix.k > MAX_CELLS:
        return f"m x k is over {MAX_CELLS:,}"
    return None


def plans(problem: Problem) -> list[Warpgroups]:
    """Return the plans that fit an SM and whose blocks are more than half full, or the smallest."""
    device, m, n = problem.device, problem.matrix.m, problem.n
    listed = (Warpgroups(*axes) for axes in product(ROWS, GROUPS, kind_of(problem).depths, BLOCKS))
    return [
        plan
        for plan in listed
        if (plan.rows == min(ROWS) or m > plan.rows // 2)
        and (plan.groups == 1 or n > plan.cols - _COLUMNS)
        and plan.blocks * threads_of(plan, problem) <= device.threads_per_sm
        and rows_at_once(plan, problem)
        and stages_of(plan, problem) >= max(LEAST_STAGES, kind_of(problem).behind + 1)
        and ceil_div(m, plan.rows) <= MAX_GRID_SIDE
    ]


def kind_of(problem: Problem) -> OperandKind:
    """Return how the problem's type is multiplied."""
    return KINDS[problem.dtype.name]


def threads_of(plan: Warpgroups, problem: Problem) -> int:
    """Return the threads of a block: its warpgroups and those that only copy."""
    return _WARPGROUP * plan.groups + kind_of(problem).copiers


def _stage_bytes(plan: Warpgroups) -> int:
    return plan.depth * (4 * (plan.cols + _PADDING) + _WEIGHT_BYTES * plan.rows) + 2 * _BARRIER_BYTES


def stages_of(plan: Warpgroups, problem: Problem) -> int:
    """Return the stages of the ring: as many as an SM has room for."""
    device = problem.device
    shared_bytes = device.shared_bytes_per_sm // plan.blocks - device.reserved_shared_bytes
    return min(MOST_STAGES, min(device.shared_bytes_per_block, shared_bytes) // _stage_bytes(plan))


def registers_allowed(plan: Warpgroups, problem: Problem) -> int:
    """Return the registers of a thread; a block has those of whole warpgroups."""
    return min(255, problem.device.registers_per_sm // (plan.blocks * threads_of(plan, problem)) // 8 * 8)


def rows_at_once(plan: Warpgroups, problem: Problem) -> int:
    """Return the most rows of A of a product for which there are registers; 0: none."""
    allowed = registers_allowed(plan, problem)
    parts = [rows for rows in kind_of(problem).at_once if plan.rows % rows == 0]
    return max((rows for rows in parts if registers_needed(plan, problem, rows) <= allowed), default=0)


def registers_needed(plan: Warpgroups, problem: Problem, at_once: int) -> int:
    """Predict the registers of a thread: sums, factors, addresses.

    For float32 also the sums of up to two products in flight, the factors of the next chunk, and the elements of B
    that these are made of. With fewer registers ptxas serialises the products.
    """
    kind, sums = kind_of(problem), plan.rows // 2 + _OTHER_REGISTERS
    if kind.products == 1:
        return sums + 4
    under_way = at_once // 2 if at_once == plan.rows else at_once - _SHARED_REGISTERS
    return sums + under_way + plan.depth // kind.step * (8 + 2 * 8)


def micros(problem: Problem, plan: Warpgroups, rates: OperandKind | None = None) -> float:
    """Predict microseconds: for each chunk the slowest of products, copies, and waits; beginning and end."""
    device, matrix, kind = problem.device, problem.matrix, rates or kind_of(problem)
    chunks = ceil_div(round(columns_of_a_block(matrix, plan.rows)), plan.depth)
    blocks = ceil_div(matrix.m, plan.rows) * ceil_div(problem.n, plan.cols)
    waves, resident = waves_of(blocks, device.sms, plan.blocks)
    multiplied = kind.products * plan.depth / kind.step * plan.groups * plan.rows / 2 / kind.multiplying_share
    copied = plan.depth * (4 * plan.cols + _WEIGHT_BYTES * plan.rows) / kind.copied_bytes_per_cycle
    own = kind.own_cycles[0] + kind.own_cycles[1] * plan.depth
    way = kind.way_cycles / (stages_of(plan, problem) - kind.behind)
    chunk = max(resident * multiplied, resident * copied, own, way) + kind.chunk_cycles
    cycles = waves * (chunks * chunk + plan.rows * plan.cols / kind.stored_per_cycle + kind.block_cycles)
    memory = 4 * problem.n * (matrix.k + matrix.m) / device.memory_bandwidth
    return LAUNCH_MICROS + 1e6 * max(cycles / device.clock_hz, memory)


def waves_of(blocks: int, sms: int, held: int) -> tuple[int, int]:
    """Return the waves of ``blocks`` if an SM has room for ``held``, and the blocks that it has at a time."""
    of_an_sm = ceil_div(blocks, sms)
    return ceil_div(of_an_sm, held), min(held, of_an_sm)


def columns_of_a_block(matrix: SparseMatrix, rows: int) -> float:
    """Return the expected columns with a nonzero in a block of rows, for random places."""
    return float(matrix.k * (1 - (1 - matrix.nnz / max(1, matrix.m * matrix.k)) ** rows))


def leaves_columns_out(matrix: SparseMatrix) -> bool:
    """Return whether blocks number only the columns of A that they need: where at most three quarters are not empty."""
    first = _filled_columns(matrix.indices[: COLUMNS_SEEN * matrix.k])  # those of the others cannot make it fewer
    return first < WORTH_LISTING * matrix.k and _filled_columns(matrix.indices) < WORTH_LISTING * matrix.k


def _filled_columns(indices: NDArray[np.int32]) -> int:
    return int(np.count_nonzero(np.bincount(indices, minlength=1)))


def pack_plan(problem: Problem, plan: Warpgroups) -> PackedKernel:
    """Return the kernel of a plan."""
    matrix, epilogue, kind = problem.matrix, problem.epilogue, kind_of(problem)
    blocks = ceil_div(matrix.m, plan.rows)
    rows = np.full(blocks * plan.rows, -1, dtype=np.int32)
    rows[: matrix.m] = np.arange(matrix.m)
    is_listed = leaves_columns_out(matrix)
    stages = stages_of(plan, problem)
    settings = {
        "ROWS": plan.rows,
        "PRODUCTS": plan.rows // rows_at_once(plan, problem),
        "GROUPS": plan.groups,
        "DEPTH": plan.depth,
        "STAGES": stages,
        "BEHIND": kind.behind,
        "LISTED": int(is_listed),
        "LOSPMM_BULK": 1,
    }
    return PackedKernel(
        entry="lospmm_warpgroups",
        source=source_of_template(
            kind.template, settings, dtype=problem.dtype, epilogue=epilogue, parts=("wgmma.cuh", "warpgroups.cuh")
        ),
        data=pack((problem.n, matrix.k), (rows, *_laid_out(problem, plan, is_listed)), epilogue=epilogue),
        launch=Launch(
            (ceil_div(problem.n, plan.cols), blocks, 1), threads_of(plan, problem), stages * _stage_bytes(plan)
        ),
        registers=registers_allowed(plan, problem),
        cols=plan.cols,
        dtype=problem.dtype,
        takes_residual=epilogue.residual,
        is_specific=True,
        floors=kind.floors,
    )


def _laid_out(problem: Problem, plan: Warpgroups, is_listed: bool) -> list[NDArray[Any]]:
    """Return the arrays of A: chunks, columns and weights.

    For float32 the weights are float16, with the inverse powers of two of the rows.
    """
    matrix, kind = problem.matrix, kind_of(problem)
    if kind.products == 1:
        starts, columns, weights = _chunks(matrix, plan, kind, is_listed)
        return [starts, columns, problem.dtype.rounded(weights)]
    powers = _powers_of_rows(matrix)
    scaled = replace(matrix, data=np.ldexp(matrix.data, np.repeat(powers, matrix.row_nnz)))
    undo = np.zeros(ceil_div(matrix.m, plan.rows) * plan.rows, dtype=np.float32)
    undo[: matrix.m] = np.ldexp(np.float32(1), -powers)
    starts, columns, weights = _chunks(scaled, plan, kind, is_listed)
    large = weights.astype(np.float16)
    return [starts, columns, np.concatenate((large, (weights - large).astype(np.float16)), axis=1), undo]


def _powers_of_rows(matrix: SparseMatrix) -> NDArray[np.int32]:
    """Return the exponents of the powers of two that scale rows of A; each power and inverse is a float32."""
    largest = np.zeros(matrix.m, dtype=np.float32)
    np.maximum.at(largest, np.repeat(np.arange(matrix.m), matrix.row_nnz), np.abs(matrix.data))
    powers: NDArray[np.int32] = np.clip(_LARGEST_EXPONENT + 1 - np.frexp(largest)[1], -126, 126)
    return powers


def _chunks(
    matrix: SparseMatrix, plan: Warpgroups, kind: OperandKind, is_listed: bool
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """Return each block's first chunk, and columns (chunks, depth) and weights of chunks, in 8-row pieces.

    The columns are all of A, or those with a nonzero in the block's rows. The padding of a last chunk is k, a column
    that does not exist.
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
        lengths = np.diff(matrix.indptr[first : first + plan.rows + 1])
        row = np.repeat(np.arange(len(lengths)), lengths)
        dense[row, place[indices]] = matrix.data[begin:end]
        steps = dense.reshape(plan.rows // 8, 8, chunks, plan.depth // kind.step, kind.step)[..., list(kind.order)]
        pieces = steps.reshape(*steps.shape[:-1], 2, kind.step // 2).transpose(2, 3, 0, 4, 1, 5)
        starts.append(starts[-1] + chunks)
        columns.append(of_block)
        weights.append(pieces.reshape(chunks, plan.rows * plan.depth))
    return (
        np.array(starts, dtype=np.int32),
        np.concatenate(columns[: None if is_listed else 1]),
        np.concatenate(weights),
    )
