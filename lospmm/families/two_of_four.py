"""Part of tensor_core for 16-bit types: A on sm_90a's sparse tensor cores (2:4).

A matrix pruned without a pattern can be brought into this one: columns may stand in any order, since rows of B are
copied in that order, and from some 80 % zeros on nearly all columns go into fours of which no row of a block has more
than two (``fours``, docs/decisions/0033). The tensor cores then do half of the work of the dense matrix.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lospmm.families import row_block
from lospmm.families.all_fours import Shared, choose_all, is_long
from lospmm.families.fours import Fours, fours_of
from lospmm.families.lane import MAX_GRID_SIDE
from lospmm.families.packed import PLACES, PackedKernel, pack, source_of_template
from lospmm.families.row_block import ROWS, WARPGROUP, threads_of
from lospmm.families.warpgroups import ARCH, columns_of_a_block, waves_of
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.dtype import Dtype
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem, ceil_div

GROUPS = (1, 2, 3)
COLS = (64, 128, 192, 256)

#: Blocks that an SM has at a time.
BLOCKS = (1, 2)

#: Blocks that share a tile of C, each with some of the chunks; only where all blocks of the grid run at a time.
CLUSTERS = (1, 2, 4, 8)

#: The most elements of A, zeros included, that are ordered; each takes 9/8 bytes.
MAX_CELLS = 2**28

#: The fewest columns of C, of which each block has 64 or more.
LEAST_COLUMNS = 24

#: Places for columns in a chunk.
DEPTH = 64

_BARRIER_BYTES = 8

#: Warps that copy, each a chunk of its own, and so the fewest stages; and the most stages.
_FEEDERS, _MOST_STAGES = 4, 12

#: Registers of a copying thread; and of a multiplying one beside its sums (measured with ptxas 13.0).
_FEEDING_REGISTERS, _OTHER_REGISTERS = 56, 46

#: Bytes of a warpgroup's weights in a chunk: 9 words a thread.
_WEIGHT_BYTES = WARPGROUP * 4 * 9

#: Mean places of a column, by the rows of a block and by the share of nonzeros (``choose_fours``, random matrices).
_SHARES = (0.2, 0.3, 0.4, 0.5, 1.0)
_PLACES = {64: (1.0, 1.01, 1.15, 1.26, 2.0), 128: (1.0, 1.1, 1.19, 1.34, 2.0), 192: (1.0, 1.14, 1.31, 1.35, 2.0)}


class TwoOfFourRates(NamedTuple):
    """Rates of an SM, from which forecasts are computed."""

    copied_bytes_per_cycle: float  # from the L2 cache
    stored_per_cycle: float  # elements of C
    chunk_cycles: float  # of a block's chunk, at least
    block_cycles: float  # before its first chunk and after its last element of C
    launch_micros: float
    exchanged_per_cycle: float  # sums that a block of a cluster writes for the others


#: Fitted to 2,700 timings on an H200 (``fitting.fit_tensor_core``): the error is 11 %, and the plan predicted fastest
#: is 1.4 % slower than the fastest on average.
RATES = TwoOfFourRates(
    copied_bytes_per_cycle=38.0,
    stored_per_cycle=6.1,
    chunk_cycles=370.0,
    block_cycles=2800.0,
    launch_micros=0.85,
    exchanged_per_cycle=2.6,
)


class Ordered(NamedTuple):
    """A in chunks."""

    starts: NDArray[np.int32]  # (blocks + 1,): the first chunk of each
    columns: NDArray[np.uint32]  # (chunks x DEPTH,): of A
    weights: NDArray[np.uint32]  # (chunks, groups, words)


@dataclass(frozen=True, slots=True)
class TwoOfFour:
    """A plan: warpgroups and columns of a block, blocks of an SM and of a cluster."""

    groups: int  # warpgroups that multiply, 64 rows of A each
    cols: int
    blocks: int  # of an SM
    cluster: int = 1  # blocks that share rows and columns of C

    @property
    def rows(self) -> int:
        """Rows of A of a block."""
        return ROWS * self.groups

    @property
    def threads(self) -> int:
        """Threads of a block: the multiplying warpgroups and one that copies."""
        return threads_of(self.groups)


def refusal(problem: Problem) -> str | None:
    """Return why this part has no kernel for the problem, or None."""
    if problem.device.arch_number != ARCH:
        return f"{problem.device.arch} has no sparse warpgroup instructions (wgmma.mma_async.sp)"
    if problem.n % 8:
        return f"n {problem.n} is not a multiple of 8: rows of B are copied 16 bytes at a time"
    if problem.n < LEAST_COLUMNS:
        return f"n {problem.n} is less than {LEAST_COLUMNS}: a block has 64 columns"
    if problem.matrix.m * problem.matrix.k > MAX_CELLS:
        return f"m x k is over {MAX_CELLS:,}"
    if problem.matrix.k * (problem.n // 8) >= 2**32:
        return f"k x n is over {2**35:,}"
    return None


def plans(problem: Problem) -> list[TwoOfFour]:
    """Return the plans that fit an SM and whose blocks are more than half full, or the smallest."""
    m, n = problem.matrix.m, problem.n
    listed = (TwoOfFour(*axes) for axes in product(GROUPS, COLS, BLOCKS, CLUSTERS))
    return [
        plan
        for plan in listed
        if (plan.groups == min(GROUPS) or m > plan.rows // 2)
        and (plan.cols == min(COLS) or n > plan.cols // 2)
        and stages_of(plan, problem) >= _FEEDERS
        and plan.cols // 2 + _OTHER_REGISTERS <= registers_of(plan, problem)[1]
        and (plan.cluster == 1 or _run_together(plan, problem))
        and _grid(plan, problem)[2] <= MAX_GRID_SIDE
    ]


def _run_together(plan: TwoOfFour, problem: Problem) -> bool:
    """Return whether all blocks run at once, one on an SM; two waves were never fastest (decision 33).

    Each must have room for its sums in the ring, and a chunk, unless columns are empty.
    """
    blocks, most = math.prod(_grid(plan, problem)), problem.device.sms_of_clusters(plan.cluster)
    is_roomy = stages_of(plan, problem) >= 2 * plan.groups
    return plan.blocks == 1 and blocks <= most and plan.cluster * DEPTH <= problem.matrix.k and is_roomy


def _grid(plan: TwoOfFour, problem: Problem) -> tuple[int, int, int]:
    return row_block.grid_of(problem, plan.rows, plan.cols, plan.cluster)


def stages_of(plan: TwoOfFour, problem: Problem) -> int:
    """Return the stages of the ring: as many as an SM has room for."""
    device = problem.device
    shared_bytes = device.shared_bytes_per_sm // plan.blocks - device.reserved_shared_bytes
    room = min(device.shared_bytes_per_block, shared_bytes) - 2 * _BARRIER_BYTES
    return min(_MOST_STAGES, room // _stage_bytes(plan))


def _stage_bytes(plan: TwoOfFour) -> int:
    return DEPTH * plan.cols * 2 + plan.groups * _WEIGHT_BYTES + 2 * _BARRIER_BYTES


def registers_of(plan: TwoOfFour, problem: Problem) -> tuple[int, int]:
    """Return a thread's registers at launch, and those of multiplying threads after the transfer."""
    return row_block.registers_of(plan.groups, _FEEDING_REGISTERS, problem.device, blocks=plan.blocks)


def micros(problem: Problem, plan: TwoOfFour, rates: TwoOfFourRates = RATES) -> float:
    """Predict microseconds: the copies to an SM for each chunk, and the stores after the last one."""
    device, matrix = problem.device, problem.matrix
    share = matrix.nnz / max(1, matrix.m * matrix.k)
    places = columns_of_a_block(matrix, plan.rows) * float(np.interp(share, _SHARES, _PLACES[plan.rows]))
    chunks = ceil_div(ceil_div(max(1, round(places)), DEPTH), plan.cluster)
    sms = device.sms_of_clusters(plan.cluster)
    waves, resident = waves_of(math.prod(_grid(plan, problem)), sms, plan.blocks)
    copied = resident * _stage_bytes(plan) / rates.copied_bytes_per_cycle
    stored = resident * plan.rows * plan.cols / plan.cluster / rates.stored_per_cycle
    if plan.cluster > 1:
        stored += resident * plan.rows * plan.cols / rates.exchanged_per_cycle
    cycles = waves * (chunks * max(copied, rates.chunk_cycles) + stored + rates.block_cycles)
    weights = ceil_div(matrix.m, plan.rows) * places / DEPTH * plan.groups * _WEIGHT_BYTES
    memory = (weights + problem.dtype.element_bytes * problem.n * (matrix.k + matrix.m)) / device.memory_bandwidth
    return rates.launch_micros + 1e6 * max(cycles / device.clock_hz, memory)


def shared(problem: Problem, plan: TwoOfFour) -> Shared | None:
    """Return the packing steps that processes can share, or None."""
    if not is_long(problem.matrix, plan.rows):
        return None
    return lambda together: choose_all(problem.matrix, plan.rows, multiple=DEPTH // 4, together=together)


def pack_plan(problem: Problem, plan: TwoOfFour) -> PackedKernel:
    """Return the kernel of a plan."""
    matrix, epilogue = problem.matrix, problem.epilogue
    launched, taken = registers_of(plan, problem)
    stages = stages_of(plan, problem)
    settings: dict[str, int | str] = {
        "GROUPS": plan.groups,
        "COLS": plan.cols,
        "STAGES": stages,
        "FEEDERS": _FEEDERS,
        "FIRST_ARRAY": 2 * PLACES * 8,
        "FEEDING_REGISTERS": _FEEDING_REGISTERS,
        "REGISTERS": taken,
        "TOKENS": "false",
        "LOSPMM_CLUSTER": plan.cluster,
        "LOSPMM_BULK": 1,
    }
    parts = ("wgmma.cuh", "wgmma_columns.cuh", "row_block.cuh")
    return PackedKernel(
        entry="lospmm_two_of_four",
        source=source_of_template("two_of_four", settings, dtype=problem.dtype, epilogue=epilogue, parts=parts),
        data=pack((problem.n, matrix.m), _laid_out(problem, plan), epilogue=epilogue),
        launch=Launch(_grid(plan, problem), plan.threads, stages * _stage_bytes(plan) + 2 * _BARRIER_BYTES),
        registers=launched,
        cols=plan.cols,
        dtype=problem.dtype,
        takes_residual=epilogue.residual,
        is_specific=True,
        is_alone=True,
    )


def _laid_out(problem: Problem, plan: TwoOfFour) -> list[NDArray[Any]]:
    """Return what each block starts with, the offsets of B's rows of each chunk, and its weights."""
    ordered = _ordered(problem.matrix, problem.dtype, plan.groups)
    rows = ordered.columns * np.uint32(problem.n // 8)
    return [_starts(ordered.starts, rows, _grid(plan, problem)), rows, ordered.weights]


def _starts(starts: NDArray[np.int32], rows: NDArray[np.uint32], grid: tuple[int, int, int]) -> NDArray[np.uint32]:
    """Return ``Start`` of the template, (blocks along z, of a cluster, words)."""
    _, cluster, along = grid
    group, row_block = np.divmod(np.arange(along)[:, np.newaxis], len(starts) - 1)
    bounds = np.diff(starts)[row_block] * np.arange(cluster + 1) // cluster + starts[row_block]
    first, end = bounds[:, :-1], bounds[:, 1:]
    chunks = np.minimum(first[..., np.newaxis] + np.arange(_FEEDERS), end[..., np.newaxis] - 1).clip(0)
    heads = np.stack(np.broadcast_arrays(first, end, row_block, group), axis=-1).astype(np.uint32)
    return np.concatenate((heads, rows.reshape(-1, DEPTH)[chunks].reshape(along, cluster, -1)), axis=-1)


#: Lets one of several threads that need the same order make it.
_ORDERING = Lock()


def _ordered(matrix: SparseMatrix, dtype: Dtype, groups: int) -> Ordered:
    """Return A in chunks, cached: ordering takes longest, and most plans differ in other parameters only."""
    with _ORDERING:
        return _order(matrix, dtype, groups)


@lru_cache(maxsize=len(GROUPS))
def _order(matrix: SparseMatrix, dtype: Dtype, groups: int) -> Ordered:
    rows, starts = ROWS * groups, [0]
    columns, weights = [], []
    for number, choice in enumerate(choose_all(matrix, rows, multiple=DEPTH // 4)):
        fours = fours_of(matrix, number * rows, rows, choice)
        starts.append(starts[-1] + len(fours.columns) // DEPTH)
        columns.append(fours.columns.astype(np.uint32))
        weights.append(_fragments(fours, dtype, groups))
    return Ordered(np.array(starts, dtype=np.int32), np.concatenate(columns), np.concatenate(weights))


def _fragments(fours: Fours, dtype: Dtype, groups: int) -> NDArray[np.uint32]:
    """Return the words (chunks, groups, 9 x threads): weights by step, thread, register, and their places.

    The layout is the PTX ISA's for sparse products.
    """
    # Rows: a warpgroup, a warp, a half, one of eight. Fours: a chunk, a step, a half, one of four lanes. Then the two.
    shape = (groups, 4, 2, 8, -1, 2, 2, 4, 2)
    pairs = dtype.to_storage(fours.weights).reshape(shape).transpose(4, 0, 5, 1, 3, 7, 6, 2, 8)
    weights = np.ascontiguousarray(pairs).view(np.uint32).reshape(pairs.shape[0], groups, -1)
    # A lane has the places of two rows in four fours, two bits each.
    shifts = (16 * np.arange(2)[:, None, None] + 4 * np.arange(4)[:, None] + 2 * np.arange(2)).astype(np.uint32)
    places = fours.places.reshape(shape).transpose(4, 0, 1, 3, 5, 6, 2, 7, 8).astype(np.uint32)
    words = np.bitwise_or.reduce(places << shifts, axis=(-3, -2, -1), dtype=np.uint32)
    return np.concatenate((weights, words.reshape(*weights.shape[:2], -1)), axis=2)
