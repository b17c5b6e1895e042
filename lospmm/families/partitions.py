"""Part of hyb: A in column partitions, with a partition's rows of B in shared memory.

A block of threads has some rows of A and a stripe of columns of C. It walks the partitions in order while the rows of
B of the next ones are in flight, so that an entry reads its row of B from shared memory, and the pieces of a row are
added up in registers: no atomics, and the same sums every time. Warps get rows by falling length, back and forth, so
that all have similar work.

It is bound by the bandwidth of shared memory, 128 bytes a cycle and SM, of which an entry takes a row of the stripe;
for 16-bit types, by the conversion to float32.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from lospmm.families.lists import MAX_GRID_SIDE, WARP, by_falling_length, weight_words
from lospmm.families.packed import PackedKernel, pack, source_of_template
from lospmm.families.traffic import L2_BYTES_PER_CYCLE_AND_SM, LAUNCH_MICROS
from lospmm.problem.problem import Launch, Problem, ceil_div

#: Bytes of C's row that a thread computes; a warp's stripe is 32 times as wide.
LANE_BYTES = (8, 16)
ROWS = (4, 8, 16)
WARPS = (8, 12, 16, 24, 32)
STAGES = (2, 3, 4)
UNITS = (2, 4)

#: Blocks that an SM holds, by their shared memory.
RESIDENT = (1, 2)

#: Columns of a partition, beside all of A's; multiples of the unit.
DEPTH_UNIT = 32
DEPTHS = (32, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024)

#: Sums that a thread may hold, and the registers that it needs beside them.
MAX_SUMS = 64
OTHER_REGISTERS = 48

#: Positions in a partition's list have 16 bits.
MAX_UNITS = (1 << 16) - 1

#: More nonzeros than this are not walked in partitions: every stripe of C reads all of A.
MAX_NONZEROS = 1 << 22

#: Counts of rows by DEPTH_UNIT columns, for each nonzero, that may be held at a time.
MAX_UNITS_OF_NONZEROS = 4

#: Entries of a block in a column of A, on average, below which most of what it copies of B would be for nothing.
LEAST_REUSE = 0.5

UNIT_BYTES = 16

#: Shared memory of the barriers of bulk copies, and the first architecture that has these.
BARRIER_BYTES = 128
BULK_ARCH = 90

#: Units after a partition's lists that are read ahead and never used.
UNITS_AHEAD = 1

SHARED_BYTES_PER_CYCLE = 128.0

#: Cycles of a warp from one row to the next, and of a block before its first and after its last partition.
PIECE_CYCLES = 55.0
BLOCK_CYCLES = 5000.0

#: Cycles of a bulk copy of one row: short rows are faster by threads, long ones in bulk.
BULK_CYCLES = 8.0
BULK_BYTES_PER_CYCLE = 180.0

#: Share of shared-memory cycles, and of issue cycles, that is not hidden.
SHARED_SHARE, ISSUED_SHARE = 0.76, 0.78


@dataclass(frozen=True, slots=True)
class Partitions:
    """A plan: rows of a block, depth of partitions, stages in shared memory."""

    lane_bytes: int
    rows: int  # of a warp
    warps: int  # of a block
    depth: int  # columns of A in a partition
    stages: int  # partitions in shared memory
    unit: int  # words of entries that are read at once
    bulk: int  # 1: B comes in bulk copies

    @property
    def block_rows(self) -> int:
        """Rows of A of a block."""
        return self.rows * self.warps

    def count(self, k: int) -> int:
        """Return the partitions of ``k`` columns of A."""
        return ceil_div(k, self.depth)

    def vector(self, problem: Problem) -> int:
        """Return the columns of C of a thread."""
        return self.lane_bytes // problem.dtype.element_bytes


@dataclass(frozen=True, slots=True)
class PartitionMemory:
    """Layout of a plan's shared memory, with ``slot`` bytes for the lists of a partition."""

    plan: Partitions
    slot: int
    count: int  # of stages that are used

    @property
    def lists_at(self) -> int:
        """Offset of the lists within a stage, in bytes."""
        return self.plan.depth * WARP * self.plan.lane_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: rows of B and lists."""
        return self.lists_at + self.slot

    @property
    def all_bytes(self) -> int:
        """Bytes of all stages."""
        return self.count * self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, in bytes."""
        return self.all_bytes + BARRIER_BYTES


def _stages(plan: Partitions, k: int, slot: int) -> PartitionMemory:
    return PartitionMemory(plan, ceil_div(slot, 128) * 128, min(plan.stages, plan.count(k)))


def _words(problem: Problem) -> int:
    return 1 if problem.dtype.element_bytes == 2 else 2


def _copy_bytes(problem: Problem) -> int:
    """Return the bytes of B that are copied at once: a divisor of a row's size."""
    return math.gcd(problem.n * problem.dtype.element_bytes, UNIT_BYTES)


def _takes_bulk(problem: Problem) -> bool:
    return problem.device.arch_number >= BULK_ARCH and _copy_bytes(problem) == UNIT_BYTES


def _registers(problem: Problem, warps: int) -> int:
    """Return the most registers of a thread."""
    return min(168, problem.device.registers_per_block // (warps * WARP) // 8 * 8)


def dealt(problem: Problem, block_rows: int, warps: int) -> NDArray[np.int64]:
    """Return the rows of each block and warp, (blocks, warps, block_rows / warps); -1: none."""
    order = by_falling_length(problem)
    blocks, rows = ceil_div(len(order), block_rows), block_rows // warps
    bins = blocks * warps
    padded = np.full(bins * rows, -1, dtype=np.int64)
    padded[: len(order)] = order
    rounds = padded.reshape(rows, bins)
    rounds[1::2] = rounds[1::2, ::-1].copy()
    return rounds.reshape(rows, warps, blocks).transpose(2, 1, 0).copy()


def _units_of_rows(problem: Problem) -> NDArray[np.uint8] | None:
    """Return the nonzeros of each row in each DEPTH_UNIT columns, (m + 1, units), and a last row of zeros.

    With it, all nonzeros are counted once for all plans. None if it would be much larger than A.
    """
    matrix, units = problem.matrix, ceil_div(problem.matrix.k, DEPTH_UNIT)
    if (matrix.m + 1) * units > MAX_UNITS_OF_NONZEROS * matrix.nnz:
        return None
    place = np.repeat(np.arange(matrix.m, dtype=np.int32) * np.int32(units), matrix.row_nnz)
    place += matrix.indices // np.int32(DEPTH_UNIT)
    return np.bincount(place, minlength=(matrix.m + 1) * units).astype(np.uint8).reshape(-1, units)


def _fine_counts(
    problem: Problem, of_rows: NDArray[np.uint8] | None, block_rows: int, warps: int
) -> NDArray[np.integer]:
    """Return the nonzeros of each block in each DEPTH_UNIT columns, (blocks, units of columns)."""
    matrix = problem.matrix
    rows = dealt(problem, block_rows, warps).reshape(-1, block_rows)  # -1 is the last row, of zeros
    if of_rows is not None:
        found: NDArray[np.int32] = of_rows[rows].sum(axis=1, dtype=np.int32)
        return found
    block_of = np.zeros(matrix.m, dtype=np.int64)
    there = rows >= 0
    block_of[rows[there]] = np.nonzero(there)[0]
    units = ceil_div(matrix.k, DEPTH_UNIT)
    place = block_of[matrix.rows_of_nonzeros()] * units + matrix.indices // DEPTH_UNIT
    return np.bincount(place, minlength=len(rows) * units).reshape(len(rows), units)


class _Most(dict[int, int]):
    """Most nonzeros of a block in one partition, by the depth of partitions; each is counted once."""

    def __init__(self, fine: NDArray[np.integer]) -> None:
        self._fine = fine

    def __missing__(self, depth: int) -> int:
        starts = np.arange(0, self._fine.shape[1], depth // DEPTH_UNIT)
        self[depth] = most = int(np.add.reduceat(self._fine, starts, axis=1).max(initial=0))
        return most


def _slot(problem: Problem, most: int, block_rows: int, unit: int) -> int:
    """Return the most bytes of a block's lists in a partition with up to ``most`` nonzeros.

    Every row of a block may pad its own list.
    """
    words, per_unit = _words(problem), unit // _words(problem)
    entries = most + min(most, block_rows) * (per_unit - 1)
    return _header_bytes(block_rows) + entries * words * 4 + (UNITS_AHEAD + 1) * UNIT_BYTES


def _header_bytes(block_rows: int) -> int:
    return ceil_div(2 * block_rows, UNIT_BYTES) * UNIT_BYTES


def plans(problem: Problem) -> list[Partitions]:
    """Return, for each number of blocks an SM, plans of the deepest partitions that fit shared memory."""
    matrix = problem.matrix
    if not 0 < matrix.nnz <= MAX_NONZEROS:
        return []
    found: dict[Partitions, None] = {}
    of_rows = _units_of_rows(problem)
    for rows, warps in product(ROWS, WARPS):
        shapes = [lane_bytes for lane_bytes in LANE_BYTES if _is_worthwhile(problem, lane_bytes, rows, warps)]
        if not shapes:
            continue
        most = _Most(_fine_counts(problem, of_rows, rows * warps, warps))
        for lane_bytes, stages, unit, resident in product(shapes, STAGES, UNITS, RESIDENT):
            plan = _deepest(problem, most, Partitions(lane_bytes, rows, warps, 0, stages, unit, 0), resident)
            if plan is not None:
                for bulk in range(2 if _takes_bulk(problem) else 1):
                    found[replace(plan, bulk=bulk)] = None
    return list(found)


def _is_worthwhile(problem: Problem, lane_bytes: int, rows: int, warps: int) -> bool:
    """Return whether sums fit the registers, and no half of a stripe or of a block is idle."""
    m, size = problem.matrix.m, problem.dtype.element_bytes
    stripe_bytes = WARP * lane_bytes
    sums = rows * lane_bytes // size
    return (
        sums <= min(MAX_SUMS, _registers(problem, warps) - OTHER_REGISTERS)
        and ceil_div(m, rows * warps) <= MAX_GRID_SIDE
        and (lane_bytes == LANE_BYTES[0] or problem.n * size > stripe_bytes // 2)
        and (rows == ROWS[0] or m > rows * warps // 2)
        and min(m, rows * warps) * problem.matrix.nnz >= LEAST_REUSE * m * problem.matrix.k
    )


def _deepest(problem: Problem, of_depth: _Most, shape: Partitions, resident: int) -> Partitions | None:
    """Return ``shape`` with the largest depth for which an SM holds ``resident`` blocks."""
    device, k = problem.device, problem.matrix.k
    most = min(device.shared_bytes_per_block, device.shared_bytes_per_sm // resident - device.reserved_shared_bytes)
    whole = ceil_div(k, DEPTH_UNIT) * DEPTH_UNIT
    row_bytes = WARP * shape.lane_bytes
    for depth in sorted({whole, *(depth for depth in DEPTHS if depth < whole)}, reverse=True):
        if min(shape.stages, ceil_div(k, depth)) * depth * row_bytes > most:  # of B's rows alone
            continue
        plan = replace(shape, depth=depth)
        stages = _stages(plan, k, _slot(problem, of_depth[depth], shape.block_rows, shape.unit))
        if stages.shared_bytes <= most and stages.slot // (shape.unit * 4) <= MAX_UNITS:
            return replace(plan, stages=min(plan.stages, max(2, plan.count(k))))
    return None


def forecast(problem: Problem, plans: Sequence[Partitions]) -> NDArray[np.float64]:
    """Predict microseconds of each plan: cycles of a block, times the blocks that an SM runs in turn.

    Timings on an H200 fit a sum, not a maximum: of shared memory's bytes, instructions, bytes from the L2 cache, a
    warp's steps from row to row, and a beginning and an end.
    """
    device, matrix, size = problem.device, problem.matrix, problem.dtype.element_bytes
    found = []
    for plan in plans:
        count, vector, words = plan.count(matrix.k), plan.vector(problem), _words(problem)
        row_bytes, per_unit = WARP * plan.lane_bytes, plan.unit // words
        blocks = ceil_div(matrix.m, plan.block_rows)
        entries, pieces = matrix.nnz / blocks, plan.block_rows * count  # of a block; a row's in a partition
        padded = entries + min(entries, pieces) * (per_unit - 1) / 2
        shared = padded * (row_bytes / SHARED_BYTES_PER_CYCLE + 1 / per_unit) + pieces
        issued = (padded * (vector * (2.0 if size == 2 else 1.0) + 4.0) + pieces * 14) / 4
        by_threads = row_bytes / L2_BYTES_PER_CYCLE_AND_SM
        in_bulk = BULK_CYCLES + row_bytes / BULK_BYTES_PER_CYCLE
        fetched = matrix.k * (in_bulk if plan.bulk else by_threads) + padded * 4 * words / L2_BYTES_PER_CYCLE_AND_SM
        walked = pieces / plan.warps * PIECE_CYCLES
        cycles = SHARED_SHARE * shared + ISSUED_SHARE * issued + fetched + walked + BLOCK_CYCLES
        waves = ceil_div(ceil_div(problem.n * size, row_bytes) * blocks, device.sms)
        reading = size * problem.n * (matrix.k + matrix.m) / device.memory_bandwidth * 1e6
        found.append(LAUNCH_MICROS + max(waves * cycles / device.clock_hz * 1e6, reading))
    return np.array(found)


def pack_plan(problem: Problem, plan: Partitions) -> PackedKernel:
    """Return the kernel of a plan."""
    matrix, dtype, epilogue = problem.matrix, problem.dtype, problem.epilogue
    count = plan.count(matrix.k)
    rows = dealt(problem, plan.block_rows, plan.warps)
    starts, lists = _lists(problem, plan, rows)
    stages = _stages(plan, matrix.k, int(np.diff(starts).max()) * UNIT_BYTES)
    settings = {
        "VECTOR": plan.vector(problem),
        "ROWS": plan.rows,
        "WARPS": plan.warps,
        "DEPTH": plan.depth,
        "STAGES": plan.stages,
        "UNIT": plan.unit,
        "WORDS": _words(problem),
        "COPY": _copy_bytes(problem),
        "LOSPMM_BULK": plan.bulk,
    }
    numbers = (problem.n, matrix.k, count, stages.lists_at, stages.stage_bytes, stages.all_bytes)
    cols = WARP * plan.vector(problem)
    return PackedKernel(
        entry="lospmm_hyb_partitions",
        source=source_of_template("hyb_partitions", settings, dtype=dtype, epilogue=epilogue),
        data=pack(numbers, (rows.astype(np.int32), starts, lists), epilogue=epilogue),
        launch=Launch((ceil_div(problem.n, cols), len(rows), 1), WARP * plan.warps, stages.shared_bytes),
        registers=_registers(problem, plan.warps),
        cols=cols,
        dtype=dtype,
        takes_residual=epilogue.residual,
    )


def _lists(problem: Problem, plan: Partitions, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """Return where the lists of each block and partition begin, in 16 bytes, and their words.

    The starts are (blocks x partitions + 1,).
    """
    matrix, words, count = problem.matrix, _words(problem), plan.count(problem.matrix.k)
    blocks, slots = len(rows), plan.block_rows
    of_slot = rows.reshape(-1)
    slot_of = np.zeros(matrix.m, dtype=np.int64)
    slot_of[of_slot[of_slot >= 0]] = np.flatnonzero(of_slot >= 0)
    block, within = np.divmod(slot_of[matrix.rows_of_nonzeros()], slots)
    partition = matrix.indices // plan.depth
    segment = (block * count + partition) * slots + within  # a row's piece in a partition
    order = np.argsort(segment, kind="stable")
    lengths = np.bincount(segment, minlength=blocks * count * slots)
    per_unit = plan.unit // words
    ends = np.cumsum(-(-lengths.reshape(-1, slots) // per_unit), axis=1)  # units, (blocks x partitions, slots)
    header = _header_bytes(slots)
    sizes = header // 16 + -(-(ends[:, -1] + UNITS_AHEAD) * plan.unit * 4 // 16)
    starts = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=starts[1:])
    content: NDArray[np.uint32] = np.zeros(int(starts[-1]) * 4, dtype=np.uint32)
    halves = content.view(np.uint16)
    halves[(starts[:-1, None] * 8 + np.arange(slots)).reshape(-1)] = ends.reshape(-1).astype(np.uint16)
    begins = (ends * plan.unit - -(-lengths.reshape(-1, slots) // per_unit) * plan.unit).reshape(-1)
    begins += np.repeat(starts[:-1] * 4 + header // 4, slots)  # words
    first = np.cumsum(lengths) - lengths
    segment, columns, values = segment[order], matrix.indices[order], matrix.data[order]
    at = begins[segment] + (np.arange(len(order)) - first[segment]) * words
    row_bytes = WARP * plan.lane_bytes
    places = (columns % plan.depth).astype(np.uint32)
    bits = weight_words(problem.dtype, values)
    last = np.append(segment[1:] != segment[:-1], True)[: len(segment)]
    padding = (-lengths[segment] % per_unit)[last]
    for extra in range(per_unit):  # the last entry of a piece is where its padding points, with weight 0
        chosen = last.copy() if extra else np.ones(len(at), dtype=bool)
        if extra:
            chosen[last] = padding >= extra
        to = at[chosen] + extra * words
        weights = bits[chosen] if extra == 0 else np.uint32(0)
        if words == 1:
            content[to] = places[chosen] * np.uint32(row_bytes // 16) | weights << np.uint32(16)
        else:
            content[to] = places[chosen] * np.uint32(row_bytes)
            content[to + 1] = weights
    return starts, content
