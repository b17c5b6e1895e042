"""Family of large 16-bit layers: A as bits and values (``pieces``), on tensor cores.

With few columns of B the product is bound by reading A (Flash-LLM's "load as sparse, compute as dense"; bits and counts
as in SpInfer, EuroSys 2025). A block has rows of A and all of K, or shares K with the other blocks of its cluster. With
more than MAX_COLUMNS of B, ``bitmap_wide`` multiplies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from lospmm.families import bitmap_wide
from lospmm.families.bitmap_wide import WideBitmap
from lospmm.families.coded import coded_refusal, scales_of, settings_of
from lospmm.families.lane import MAX_GRID_SIDE, WARP
from lospmm.families.packed import PackedKernel, array_at, pack, source_of_template
from lospmm.families.pieces import (
    STEP,
    TILE_ROWS,
    UNIT,
    PieceShape,
    counts,
    laid_out,
    piece_bytes,
    share_of_pairs,
)
from lospmm.families.traffic import LAUNCH_MICROS
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem, ceil_div

SHAPES = tuple(
    PieceShape(tiles, depth, per_bit)
    for tiles, depth, per_bit in product((1, 2, 4), (64, 128), (1, 2))
    if tiles * depth >= per_bit * UNIT
)
ROWS = (1, 2, 4)
PARTS = (2, 4, 8, 16)
CLUSTERS = (1, 2, 4, 8)
STAGES = (2, 3, 4)
COLS = (8, 16, 32, 64)

#: The most columns of B with which A's columns are paired: with more, looking up rows of B takes longer than it saves.
MAX_PAIRED_COLS = 16

#: The most columns of B whose rows are copied unchanged.
MAX_WHOLE_COLS = 16

#: Warps of a block.
MIN_WARPS, MAX_WARPS = 4, 16

#: The most columns of B: with more, reading A is no longer the bottleneck.
MAX_COLUMNS = COLS[-1]

#: The most rows x columns of A.
MAX_CELLS = 2**30

#: Warps of an SM that registers must suffice for; and the most registers that a plan may be predicted to need.
RESIDENT_WARPS, MOST_REGISTERS = 16, 224


@dataclass(frozen=True, slots=True)
class BitmapPlan:
    """A plan: the shape of a block and its pieces of A."""

    tiles: int  # of 16 rows, of a warp
    depth: int  # columns of A of a piece
    rows: int  # warps below each other
    parts: int  # warps that share rows
    cluster: int  # blocks that share rows
    stages: int  # pieces of A in a warp's shared memory
    cols: int
    per_bit: int = 2  # elements that have a bit together
    shared: int = 0  # 1: A is as kernels of every N read it

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.rows * self.parts

    @property
    def block_rows(self) -> int:
        """Rows of A of a block."""
        return self.rows * self.tiles * TILE_ROWS

    @property
    def shape(self) -> PieceShape:
        """The shape of a piece of A; with few columns of B, odd columns of A change places."""
        is_paired = self.per_bit == 2 and not self.shared and self.cols <= MAX_PAIRED_COLS
        return PieceShape(self.tiles, self.depth, self.per_bit, is_paired)


Plan = BitmapPlan | WideBitmap


def refusal(problem: Problem) -> str | None:
    """Return why this family has no kernel for the problem, or None."""
    if not problem.dtype.is_16_bit:
        return f"needs a 16-bit dtype, not {problem.dtype.name}"
    if problem.device.arch_number < 80:
        return f"needs tensor cores of sm_80 or later, not {problem.device.arch}"
    if (why := coded_refusal(problem)) is not None:
        return why
    if problem.matrix.m * problem.matrix.k > MAX_CELLS:
        return f"m x k is over {MAX_CELLS:,}"
    return bitmap_wide.refusal(problem) if problem.n > MAX_COLUMNS else None


def plans(problem: Problem) -> Sequence[Plan]:
    """Return the plans for the problem's columns of B."""
    return bitmap_wide.plans(problem) if problem.n > MAX_COLUMNS else _plans(problem)


def one_copy_refusal(problem: Problem) -> str | None:
    """Return why no kernel reads A as those of every N do, or None."""
    return refusal(problem) or (bitmap_wide.refusal(problem) if problem.n > MAX_WHOLE_COLS else None)


def one_copy_plans(problem: Problem) -> Sequence[Plan]:
    """Return the plans that read A as those of every N do."""
    if problem.n > MAX_WHOLE_COLS:
        return bitmap_wide.plans(problem)
    found = _plans(problem, [bitmap_wide.SHAPE])
    return [replace(plan, shared=1) for plan in found if plan.parts * plan.cluster <= bitmap_wide.firsts_of(problem)]


def _plans(problem: Problem, shapes: Sequence[PieceShape] = SHAPES) -> list[BitmapPlan]:
    """Return plans of blocks no taller than A, with no more parts than pieces; clusters from sm_90 on."""
    matrix = problem.matrix
    clusters = CLUSTERS if has_bulk_copies(problem) else CLUSTERS[:1]
    tall = ceil_div(matrix.m, TILE_ROWS)
    cols = next(cols for cols in COLS if cols >= problem.n)
    largest = {shape: piece_bytes(counts(matrix, shape.per_bit), shape, values=problem.values) for shape in shapes}
    return [
        plan
        for shape, rows, parts, cluster, stages in product(shapes, ROWS, PARTS, clusters, STAGES)
        if (shape.tiles * rows == 1 or shape.tiles * rows < 2 * tall)
        and (parts * cluster == MIN_WARPS or parts * cluster <= ceil_div(matrix.k, shape.depth))
        and MIN_WARPS <= rows * parts <= MAX_WARPS
        and fits(plan := _plan(shape, rows, parts, cluster, stages, cols), problem, largest[shape])
    ]


def _plan(shape: PieceShape, rows: int, parts: int, cluster: int, stages: int, cols: int) -> BitmapPlan:
    return BitmapPlan(shape.tiles, shape.depth, rows, parts, cluster, stages, cols, shape.per_bit)


def fits(plan: BitmapPlan, problem: Problem, largest_piece: int) -> bool:
    """Return whether shared memory, grid and registers have room for a plan."""
    return (
        shared_bytes(plan, problem, largest_piece) <= problem.device.shared_bytes_per_block
        and _grid(plan, problem)[2] <= MAX_GRID_SIDE
        and registers_needed(plan, problem) <= min(MOST_REGISTERS, registers_allowed(plan, problem))
    )


def _grid(plan: BitmapPlan, problem: Problem) -> tuple[int, int, int]:
    return ceil_div(problem.n, plan.cols), plan.cluster, ceil_div(problem.matrix.m, plan.block_rows)


def vector(problem: Problem) -> int:
    """Return the elements of a row of B that are copied at once."""
    return int(np.gcd(8, problem.n))


def has_bulk_copies(problem: Problem) -> bool:
    """Return whether the GPU has bulk copies (sm_90 and later)."""
    return problem.device.arch_number >= 90


def is_whole(plan: BitmapPlan, problem: Problem) -> bool:
    """Return whether B's rows of a piece are one copy; with many columns that causes bank conflicts."""
    if problem.n == 1:
        return has_bulk_copies(problem) and problem.matrix.k % 8 == 0
    return has_bulk_copies(problem) and problem.n == plan.cols and plan.cols <= MAX_WHOLE_COLS


def is_staged(plan: BitmapPlan, problem: Problem) -> bool:
    """Return whether B goes through shared memory; else straight to registers."""
    return vector(problem) > 1 or is_whole(plan, problem)


def shared_bytes(plan: BitmapPlan, problem: Problem, largest_piece: int) -> int:
    """Return the shared memory of a block: pieces of A and B, and value offsets; later the warps' sums."""
    of_b = plan.depth * (plan.cols if problem.n > 1 else 1) * 2 if is_staged(plan, problem) else 0
    ring = plan.stages * (largest_piece + of_b) + 8 * plan.shape.words
    barriers = plan.warps * plan.stages * 8
    return max(plan.warps * ring, plan.parts * plan.block_rows * plan.cols * 4) + barriers


def registers_allowed(plan: BitmapPlan, problem: Problem) -> int:
    """Return a thread's registers that leave room for RESIDENT_WARPS an SM, or half of them if needed."""
    many = 65_536 // (WARP * RESIDENT_WARPS)
    return many if registers_needed(plan, problem) <= many else min(255, 65_536 // (WARP * plan.warps) // 8 * 8)


def registers_needed(plan: BitmapPlan, problem: Problem) -> int:
    """Predict the registers of a thread: sums, B of a piece, and a fixed rest (measured with ptxas 13.0)."""
    of_b = plan.cols // 8 * 2 * (UNIT // STEP if vector(problem) == 1 or plan.cols == COLS[0] else 1)
    rest = (64 if has_bulk_copies(problem) else 84) + (12 if plan.per_bit == 1 else 0)
    return plan.tiles * plan.cols // 2 + of_b + rest


#: Cycles of a sub-partition for an element of each lane, to make fragments, by ``per_bit``, and for a piece of a warp
#: beside them; and warps that keep it busy. Fitted for single bits to 256 timings of 48 problems on an H100, so that
#: forecasts are above the times by as much as those for pairs, for which corrections were learned.
CYCLES_PER_ELEMENT, CYCLES_PER_PIECE = {1: 5.7, 2: 2.6}, 160.0
BUSY_WARPS = 16.0

#: Microseconds between the first load and the first product, and after the last one; the share of the memory bandwidth
#: that is reached; and the latency of a byte in seconds.
START_MICROS, SHARE_OF_BANDWIDTH, LATENCY_SECONDS = 1.5, 0.85, 0.6e-6

#: Microseconds for blocks of a cluster to wait for each other and add up, for each of them.
CLUSTER_MICROS = 0.5

#: Microseconds between blocks that end and those that follow them on an SM: by themselves, and in clusters.
WAVE_MICROS, WAVE_OF_CLUSTERS_MICROS = 2.0, 4.0

#: Share of the SMs that clusters of more than two blocks can use: a cluster lies in one part of the GPU.
SHARE_FOR_CLUSTERS, SMALL_CLUSTER = 0.95, 2

#: Bytes from the L2 cache in a cycle and SM.
L2_BYTES_PER_CYCLE = 32.0

#: Share of the shorter times that is not hidden behind the longest.
NOT_HIDDEN = 0.2


def forecast(problem: Problem, plans: Sequence[Plan]) -> NDArray[np.float64]:
    """Predict the microseconds of each plan, (plans,); all are of one kind."""
    wide = [plan for plan in plans if isinstance(plan, WideBitmap)]
    narrow = [plan for plan in plans if isinstance(plan, BitmapPlan)]
    return bitmap_wide.forecast(problem, wide) if wide else _forecast(problem, narrow)


def _forecast(problem: Problem, plans: Sequence[BitmapPlan]) -> NDArray[np.float64]:
    """Predict microseconds of each plan on the busiest SM: reading A, rereading B, making fragments."""
    shapes = {plan.shape for plan in plans}
    shares = {shape: share_of_pairs(problem.matrix, shape) if shape.is_paired else 1.0 for shape in shapes}
    held = {shape: counts(problem.matrix, shape.per_bit) for shape in shapes}
    largest = {shape: piece_bytes(held[shape], shape, shares[shape], values=problem.values) for shape in shapes}
    bits = {shape: shares[shape] * int(held[shape].sum()) for shape in shapes}
    return np.array([_micros(problem, plan, largest[plan.shape], bits[plan.shape]) for plan in plans])


def _micros(problem: Problem, plan: BitmapPlan, largest_piece: int, bits: float) -> float:
    device, matrix, n = problem.device, problem.matrix, problem.n
    across, _, tall = _grid(plan, problem)
    blocks = across * plan.cluster * tall
    pieces = ceil_div(matrix.k, plan.depth)
    of_all = tall * plan.rows * pieces  # pieces
    a_bytes = bits * plan.shape.value_bytes(problem.values) + of_all * plan.shape.head_bytes
    b_bytes = of_all * plan.depth * min(n, plan.cols) * 2
    shared = shared_bytes(plan, problem, largest_piece) + device.reserved_shared_bytes
    registers = registers_allowed(plan, problem) * WARP * plan.warps
    resident = max(1, min(device.shared_bytes_per_sm // shared, device.registers_per_sm // registers))
    each = min(resident, ceil_div(blocks, device.sms))  # blocks of an SM at a time
    share = SHARE_FOR_CLUSTERS if plan.cluster > SMALL_CLUSTER else 1.0
    waves = ceil_div(blocks, int(each * device.sms * share))
    parts = plan.parts * plan.cluster
    walked = ceil_div(pieces, parts)  # by a warp of a block

    piece_cells = plan.tiles * TILE_ROWS * plan.depth
    of_piece = piece_cells / 32 * (CYCLES_PER_ELEMENT[plan.per_bit] + plan.cols / 16) + CYCLES_PER_PIECE
    busy = min(1.0, (each * plan.warps / BUSY_WARPS) ** 0.7)
    making = waves * walked * each * plan.warps / 4 * of_piece / busy
    piece_bytes = (a_bytes + b_bytes) / of_all
    flying = each * plan.warps * (plan.stages - 1) * piece_bytes / (LATENCY_SECONDS * device.clock_hz)
    reading = waves * walked * each * plan.warps * piece_bytes / min(L2_BYTES_PER_CYCLE, flying)
    memory = (a_bytes + n * (matrix.k + matrix.m) * 2) / (SHARE_OF_BANDWIDTH * device.memory_bandwidth)
    limits = (making, reading, memory * device.clock_hz)
    cycles = max(limits) + NOT_HIDDEN * (sum(limits) - max(limits))
    is_cluster = plan.cluster > 1
    apart = CLUSTER_MICROS * plan.cluster * is_cluster
    apart += (waves - 1) * (WAVE_OF_CLUSTERS_MICROS if is_cluster else WAVE_MICROS)
    return LAUNCH_MICROS + START_MICROS + apart + 1e6 * float(cycles) / device.clock_hz


def pack_plan(problem: Problem, plan: Plan) -> PackedKernel:
    """Return the kernel of a plan."""
    return bitmap_wide.pack_plan(problem, plan) if isinstance(plan, WideBitmap) else _packed(problem, plan)


def _packed(problem: Problem, plan: BitmapPlan) -> PackedKernel:
    matrix, dtype, epilogue = problem.matrix, problem.dtype, problem.epilogue
    walkers = plan.parts * plan.cluster
    if plan.shared:
        data, largest = bitmap_wide.data_of(problem)
    else:
        pieces = laid_out(matrix, dtype, plan.shape, plan.block_rows, walkers, problem.values)
        data = pack((matrix.m,), pieces.arrays, epilogue=epilogue, scales=scales_of(problem))
        largest = pieces.largest
    entry = f"lospmm_bitmap_n{problem.n}"
    settings: dict[str, int | str] = {
        "ENTRY": entry,
        "M": matrix.m,
        "K": matrix.k,
        **settings_of(problem.values),
        "N": problem.n,
        "TILES": plan.tiles,
        "DEPTH": plan.depth,
        "ROWS": plan.rows,
        "PARTS": plan.parts,
        "COLS": plan.cols,
        "STAGES": plan.stages,
        "PER_BIT": plan.per_bit,
        "PAIRED": int(plan.shape.is_paired),
        "PIECE_BYTES": largest,
        "FIRST_ARRAY": array_at(data, 0),
        "STARTS_ARRAY": array_at(data, 1),
        "OTHERS_ARRAY": array_at(data, 2),
        "FIRSTS": bitmap_wide.firsts_of(problem) if plan.shared else walkers,
        "STAGED": int(is_staged(plan, problem)),
        "VECTOR": vector(problem),
        "WHOLE": int(is_whole(plan, problem)),
        "LOSPMM_BULK": int(has_bulk_copies(problem)),
        "C_TOKENS": 0 if plan.shared and problem.n > 1 else "false",
        "LOSPMM_CLUSTER": plan.cluster,
    }
    return PackedKernel(
        entry=entry,
        source=source_of_template("bitmap", settings, dtype=dtype, epilogue=epilogue, parts=("pieces.cuh",)),
        data=data,
        launch=Launch(_grid(plan, problem), WARP * plan.warps, shared_bytes(plan, problem, largest)),
        registers=registers_allowed(plan, problem),
        cols=plan.cols,
        dtype=dtype,
        takes_residual=epilogue.residual,
    )
