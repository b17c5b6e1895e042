"""Part of bitmap for more than 64 columns of B: A's bits made fragments of sm_90a's warpgroup products.

A is stored in the pieces of the kernels for few columns of B, in 0.4 to 0.8 of the dense A's bytes at 80 to 50 % zeros.
Zeros are multiplied, so it is about as fast as the dense product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from lospmm.families.coded import scales_of, settings_of
from lospmm.families.lane import MAX_GRID_SIDE
from lospmm.families.packed import PackedKernel, array_at, pack, source_of_template
from lospmm.families.pieces import (
    LEAST_FIRSTS,
    MOST_FIRSTS,
    SHARED_ROWS,
    PieceShape,
    counts,
    laid_out,
    piece_bytes,
)
from lospmm.families.row_block import ROWS, grid_of, registers_of, threads_of
from lospmm.families.warpgroups import ARCH
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem, ceil_div
from lospmm.problem.values import pair_bytes

GROUPS = (1, 2)
COLS = (64, 128, 192, 256)

#: Blocks that share a tile of C, each with some of the pieces.
CLUSTERS = (1, 2, 4, 8)

#: The one shape of a piece that it reads: a warp has 16 rows.
SHAPE = PieceShape(tiles=1, depth=128)

#: Rows of B that are copied at a time, a chunk.
CHUNK = 64

_BARRIER_BYTES = 8

#: The fewest and the most stages of the ring; and pieces of A of a warp in shared memory.
_LEAST_STAGES, _MOST_STAGES, _SLOTS = 3, 8, 2

#: Bytes of B's tensor map, of which each SM has its own; and the most SMs of a GPU.
_MAP_BYTES, _MOST_SMS = 128, 256

#: Bytes in which a warp keeps the places of a piece's values.
_PLACE_BYTES = 8 * SHAPE.words

#: Registers of a copying thread.
_FEEDING_REGISTERS = 40

#: Cycles of an SM for a chunk: to multiply a column of B with 64 rows of A; to make fragments, at least; and to make
#: those of 64 rows if every pair of elements has a nonzero. Per cycle: bytes from the L2 cache, elements of C stored,
#: and sums that a block of a cluster sends. Fitted to 112 timings of seven problems on an H200, then for fragments and
#: sums to ten on an H100. In each, the plan predicted fastest was the fastest.
PRODUCT_CYCLES, FRAGMENT_CYCLES, CYCLES_PER_PAIR = 2.08, 825.0, 140.0
COPIED_PER_CYCLE, STORED_PER_CYCLE, EXCHANGED_PER_CYCLE = 44.7, 1.35, 3.1
START_MICROS = 2.2


@dataclass(frozen=True, slots=True)
class WideBitmap:
    """A plan: warpgroups and columns of a block, and the blocks of a cluster."""

    groups: int  # warpgroups that multiply, 64 rows of A each
    cols: int
    cluster: int  # blocks that share rows and columns of C

    @property
    def rows(self) -> int:
        """Rows of A of a block."""
        return ROWS * self.groups

    @property
    def warps(self) -> int:
        """Warps that multiply."""
        return self.rows // SHAPE.rows

    @property
    def threads(self) -> int:
        """Threads of a block: the multiplying warpgroups and one that copies."""
        return threads_of(self.groups)


def refusal(problem: Problem) -> str | None:
    """Return why this part has no kernel for the problem, or None."""
    if problem.device.arch_number != ARCH:
        return f"{problem.device.arch} has no warpgroup instructions (wgmma), which n {problem.n} needs"
    if problem.n % 8:
        return f"n {problem.n} is not a multiple of 8: rows of B are copied 16 bytes at a time"
    return None


def plans(problem: Problem) -> list[WideBitmap]:
    """Return the plans that fit an SM and whose blocks are more than half full."""
    m, n, pieces = problem.matrix.m, problem.n, ceil_div(problem.matrix.k, SHAPE.depth)
    largest = piece_bytes(counts(problem.matrix, SHAPE.per_bit), SHAPE, values=problem.values)
    listed = (WideBitmap(*axes) for axes in product(GROUPS, COLS, CLUSTERS))
    return [
        plan
        for plan in listed
        if (plan.groups == min(GROUPS) or m > plan.rows // 2)
        and (plan.cols == min(COLS) or n > plan.cols // 2)
        and stages_of(plan, problem, largest) >= _LEAST_STAGES
        and (plan.cluster == 1 or (plan.cluster <= pieces and _shares(plan, problem, largest)))
        and _grid(plan, problem)[2] <= MAX_GRID_SIDE
    ]


def _shares(plan: WideBitmap, problem: Problem, largest: int) -> bool:
    """Return whether a cluster shares a tile, whose sums fit a block's ring, and C its parts."""
    has_room = plan.rows * plan.cols * 4 <= stages_of(plan, problem, largest) * _stage_bytes(plan)
    return _turns(plan, problem)[1] and has_room and plan.cols // 8 % plan.cluster == 0


def _grid(plan: WideBitmap, problem: Problem) -> tuple[int, int, int]:
    """Return the grid: no more blocks than run at once, which take several tiles each."""
    across, cluster, along = grid_of(problem, plan.rows, plan.cols, plan.cluster)
    return across, cluster, min(along, max(1, problem.device.sms_of_clusters(cluster) // cluster // across))


def _turns(plan: WideBitmap, problem: Problem) -> tuple[int, bool]:
    """Return how many tiles a block has for itself, and whether its cluster shares one more."""
    tiles, clusters = grid_of(problem, plan.rows, plan.cols, plan.cluster)[2], _grid(plan, problem)[2]
    whole, rest = divmod(tiles, plan.cluster * clusters)
    return whole + (rest > clusters), 0 < rest <= clusters


def _stage_bytes(plan: WideBitmap) -> int:
    return CHUNK * plan.cols * 2


def _fixed_bytes(plan: WideBitmap, largest: int) -> int:
    """Return the shared memory beside the ring: pieces of A, the map of B, and barriers."""
    return plan.warps * (_SLOTS * (largest + 2 * _BARRIER_BYTES) + _PLACE_BYTES) + _MAP_BYTES + 2 * _BARRIER_BYTES


def stages_of(plan: WideBitmap, problem: Problem, largest: int) -> int:
    """Return the stages of the ring: as many as an SM has room for beside pieces of ``largest`` bytes."""
    room = problem.device.shared_bytes_per_block - _fixed_bytes(plan, largest)
    return min(_MOST_STAGES, room // (_stage_bytes(plan) + 2 * _BARRIER_BYTES))


def forecast(problem: Problem, plans: Sequence[WideBitmap]) -> NDArray[np.float64]:
    """Predict microseconds of each plan, (plans,): products, fragments or copies of each chunk, and the stores."""
    pairs = int(counts(problem.matrix, SHAPE.per_bit).sum())
    return np.array([_micros(problem, plan, pairs) for plan in plans])


def _micros(problem: Problem, plan: WideBitmap, pairs: int) -> float:
    device, matrix = problem.device, problem.matrix
    pieces = ceil_div(matrix.k, SHAPE.depth)
    bytes_of_a = pair_bytes(problem.values) * pairs + matrix.m * matrix.k / 16
    cells = matrix.m * matrix.k
    own = bytes_of_a / cells * plan.rows * CHUNK
    products = plan.groups * plan.cols * PRODUCT_CYCLES
    fragments = FRAGMENT_CYCLES + CYCLES_PER_PAIR * plan.groups * 2 * pairs / cells
    copied = (_stage_bytes(plan) + own) / COPIED_PER_CYCLE
    piece = SHAPE.depth // CHUNK * max(products, fragments, copied)
    stored = plan.rows * plan.cols / STORED_PER_CYCLE
    whole, is_shared = _turns(plan, problem)
    cycles = whole * (pieces * piece + stored)
    if is_shared:
        exchanged = plan.rows * plan.cols / EXCHANGED_PER_CYCLE if plan.cluster > 1 else 0.0
        cycles += ceil_div(pieces, plan.cluster) * piece + stored / plan.cluster + exchanged
    memory = (bytes_of_a + 2 * problem.n * (matrix.k + matrix.m)) / device.memory_bandwidth
    return START_MICROS + 1e6 * max(cycles / device.clock_hz, memory)


def firsts_of(problem: Problem) -> int:
    """Return the pieces of a row of tiles at known places, in the data of every N."""
    return min(MOST_FIRSTS, max(LEAST_FIRSTS, ceil_div(problem.matrix.k, SHAPE.depth)))


def data_of(problem: Problem) -> tuple[bytes, int]:
    """Return the data that kernels of every N read, and the bytes of the largest piece."""
    matrix = problem.matrix
    pieces = laid_out(matrix, problem.dtype, SHAPE, SHARED_ROWS, firsts_of(problem), problem.values)
    return pack((matrix.m,), pieces.arrays, epilogue=problem.epilogue, scales=scales_of(problem)), pieces.largest


def pack_plan(problem: Problem, plan: WideBitmap) -> PackedKernel:
    """Return the kernel of a plan."""
    data, largest = data_of(problem)
    stages = stages_of(plan, problem, largest)
    launched, taken = registers_of(plan.groups, _FEEDING_REGISTERS, problem.device)
    entry, grid = f"lospmm_bitmap_n{problem.n}", _grid(plan, problem)
    settings: dict[str, int | str] = {
        "ENTRY": entry,
        "M": problem.matrix.m,
        "K": problem.matrix.k,
        "N": problem.n,
        **settings_of(problem.values),
        "TILES": SHAPE.tiles,
        "DEPTH": SHAPE.depth,
        "PER_BIT": SHAPE.per_bit,
        "PAIRED": int(SHAPE.is_paired),
        "PIECE_BYTES": largest,
        "SLOTS": _SLOTS,
        "FIRST_ARRAY": array_at(data, 0),
        "STARTS_ARRAY": array_at(data, 1),
        "OTHERS_ARRAY": array_at(data, 2),
        "FIRSTS": firsts_of(problem),
        "MAPS": _MOST_SMS,
        "ACROSS": grid[0],
        "CLUSTERS": grid[2],
        "GROUPS": plan.groups,
        "COLS": plan.cols,
        "STAGES": stages,
        "FEEDING_REGISTERS": _FEEDING_REGISTERS,
        "REGISTERS": taken,
        "TOKENS": 0 if problem.matrix.m % 8 == problem.matrix.k % 8 == 0 else "false",
        "LOSPMM_CLUSTER": plan.cluster,
        "LOSPMM_BULK": 1,
    }
    parts = ("pieces.cuh", "wgmma.cuh", "wgmma_columns.cuh", "boxes.cuh", "row_block.cuh")
    needed = stages * (_stage_bytes(plan) + 2 * _BARRIER_BYTES) + _fixed_bytes(plan, largest)
    alone = problem.device.shared_bytes_per_sm // 2  # so that an SM has one block, and its map is that block's
    return PackedKernel(
        entry=entry,
        source=source_of_template("bitmap_wide", settings, dtype=problem.dtype, epilogue=problem.epilogue, parts=parts),
        data=data,
        launch=Launch(grid, plan.threads, max(needed, alone)),
        registers=launched,
        cols=plan.cols,
        dtype=problem.dtype,
        takes_residual=problem.epilogue.residual,
        is_specific=True,
        is_alone=True,
    )
