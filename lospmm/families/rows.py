"""csr and hyb, which differ in how many teams of threads share a row: ``templates/rows.cu``.

Rows are sorted by falling length (Gale et al. 2020, "row swizzle"), so that those of a block, and the blocks that run
at the same time, have similar work. A block pads its rows to the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lospmm.families.lane import WARP, Lane, grid_of, lanes
from lospmm.families.packed import PLACES, PackedKernel, pack, source_of_template
from lospmm.families.traffic import L2_BYTES_PER_CYCLE_AND_SM, LAUNCH_MICROS
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem, ceil_div

#: Columns that 16 bits can number.
MAX_NARROW_COLUMNS = 1 << 16

REGISTERS = 128

#: Warps of a block; entries that a thread reads at once, whose rows of B are in flight together; entries of a team.
CSR_WARPS, HYB_WARPS = (4, 8), (4, 16)
GROUPS = (2, 4, 8)
WORK = (4, 8, 16, 64)

#: Cycles of a warp that reads its entries: before the first group; for a group and for each entry of it, on a busy SM
#: and on one with few warps ("lone"); and to add up the sums of several teams. Fitted to hyb and csr on an H200.
WALK_CYCLES = 2200.0
GROUP_CYCLES, ENTRY_CYCLES = 900.0, 100.0
LONE_GROUP_CYCLES, LONE_ENTRY_CYCLES = 500.0, 50.0
ADD_CYCLES = 600.0

#: Share of the shorter times that is not hidden behind the longest.
NOT_HIDDEN = 0.2

#: Registers of a thread beside those of the entries in flight and of their rows of B.
WALK_REGISTERS = 40

#: Bytes that the L2 cache delivers at a time.
SECTOR_BYTES = 32


def entry_words(problem: Problem) -> int:
    """Return the 32-bit words of an entry: one if the weight and the column have 16 bits each."""
    return 1 if problem.dtype.element_bytes == 2 and problem.matrix.k <= MAX_NARROW_COLUMNS else 2


@dataclass(frozen=True, slots=True)
class CsrPlan:
    """A plan of csr: rows of A, each read by equally many teams of threads (row splitting, as in Sputnik).

    A warp has as many rows as there is room for beside the columns of C. Several teams may share the entries of a row:
    N of 1 to 16 needs that.
    """

    vector: int  # columns next to each other that a thread computes
    team: int  # threads side by side in a row of C
    slices: int  # teams that share a row
    group: int  # entries that a team reads at once
    warps: int  # of a block


@dataclass(frozen=True, slots=True)
class Buckets:
    """A plan of hyb (SparseTIR, section 4.1) without column partitions: rows in buckets by their length.

    Each bucket has its own number of teams that share a row. All are one launch, the longest rows first.
    """

    vector: int
    team: int  # of one warp, or of all warps of a block
    group: int
    work: int  # entries of a team, about
    warps: int


RowsPlan = CsrPlan | Buckets


def csr_plans(problem: Problem) -> list[CsrPlan]:
    """Return plans with no more slices than the longest row has groups."""
    longest = int(problem.matrix.row_nnz.max(initial=0))
    return [
        CsrPlan(lane.vector, lane.team, slices, group, warps)
        for lane in lanes(problem)
        for slices in (1, 2, 4, 8, 16, 32)
        for group in GROUPS
        for warps in CSR_WARPS
        if lane.team * slices <= WARP and (slices == 1 or slices * group < 2 * longest)
    ]


def hyb_plans(problem: Problem) -> list[Buckets]:
    """Return the plans, including the widest vectors in small teams: more teams then share a long row."""
    wide = lanes(problem)
    narrow = Lane(wide[0].vector, 8)
    return [
        Buckets(lane.vector, lane.team, group, work, warps)
        for lane in ([*wide, narrow] if wide[0].team > narrow.team else wide)
        for group in GROUPS
        for work in WORK
        for warps in HYB_WARPS
        if work >= group and (group < GROUPS[-1] or lane.vector <= 4)
    ]


def teams_of(plan: RowsPlan) -> int:
    """Return the teams of a block."""
    return plan.warps * WARP // plan.team


def _ends(matrix: SparseMatrix, plan: RowsPlan) -> list[tuple[int, int]]:
    """Return log2 of a row's teams, and the end of such rows by falling length; of hyb as ``work`` asks."""
    if isinstance(plan, CsrPlan):
        return [(plan.slices.bit_length() - 1, matrix.m)]
    _, lengths = by_falling_length(matrix)
    shifts = range(teams_of(plan).bit_length() - 1, -1, -1)
    ends = [int(np.searchsorted(-lengths, -(plan.work << shift - 1))) for shift in shifts[:-1]]
    return list(zip(shifts, [*ends, matrix.m], strict=True))


@dataclass(frozen=True, slots=True)
class BlockedRows:
    """Blocks of rows by falling length, (blocks,) each; a step is a group of entries for each team."""

    firsts: NDArray[np.int64]  # places of their first rows
    rows: NDArray[np.int64]
    shifts: NDArray[np.int64]  # log2 of the teams that share a row
    steps: NDArray[np.int64]


@lru_cache(maxsize=4)
def by_falling_length(matrix: SparseMatrix) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows, longest first, and their lengths; rows of equal length keep their order."""
    lengths = matrix.row_nnz
    rows = np.argsort(-lengths, kind="stable")
    return rows, lengths[rows]


def blocks_of(matrix: SparseMatrix, plan: RowsPlan, ends: Sequence[tuple[int, int]]) -> BlockedRows:
    """Return the blocks of a plan; ``ends`` as in ``_ends``."""
    _, lengths = by_falling_length(matrix)
    teams, begin = teams_of(plan), 0
    firsts, rows, shifts = [], [], []
    for shift, end in ends:
        own = np.arange(begin, end, teams >> shift)
        firsts.append(own)
        rows.append(np.minimum(teams >> shift, end - own))
        shifts.append(np.full(len(own), shift))
        begin = end
    found = np.concatenate(firsts), np.concatenate(rows), np.concatenate(shifts)
    return BlockedRows(*found, np.maximum(1, -(-lengths[found[0]] // (plan.group << found[2]))))


def forecast(problem: Problem, plans: Sequence[RowsPlan]) -> NDArray[np.float64]:
    """Predict the microseconds of each plan, (plans,)."""
    return np.array([_micros(problem, plan) for plan in plans])


def _micros(problem: Problem, plan: RowsPlan) -> float:
    """Predict microseconds: teams walk their entries, padding included, group after group, and gather B from L2."""
    device, size, n, lane = problem.device, problem.dtype.element_bytes, problem.n, Lane(plan.vector, plan.team)
    blocks, words = blocks_of(problem.matrix, plan, _ends(problem.matrix, plan)), entry_words(problem)
    teams = blocks.rows << blocks.shifts
    walks, shared_walks = float(teams.sum()), float(teams[blocks.shifts > 0].sum())
    groups, longest = float(teams @ blocks.steps), float(blocks.steps.max(initial=0))
    entries = groups * plan.group
    across = ceil_div(n, lane.cols)
    l2_bytes = across * (_gathered_bytes(problem, size * min(n, lane.cols)) + entries * 4 * words)
    memory_bytes = entries * 4 * words + size * n * (problem.matrix.k + problem.matrix.m)
    registers = WALK_REGISTERS + plan.group * (words + lane.vector * size / 4)
    resident = device.sms * min(device.threads_per_sm, device.registers_per_sm / registers) / device.warp_size
    warps = across * lane.team / device.warp_size
    in_company = GROUP_CYCLES + ENTRY_CYCLES * plan.group
    limits = (
        l2_bytes / (L2_BYTES_PER_CYCLE_AND_SM * device.sms),
        memory_bytes / device.memory_bandwidth * device.clock_hz,
        warps * (walks * WALK_CYCLES + shared_walks * ADD_CYCLES + groups * in_company) / resident,
        WALK_CYCLES + longest * (LONE_GROUP_CYCLES + LONE_ENTRY_CYCLES * plan.group),
    )
    cycles = max(limits) + NOT_HIDDEN * (sum(limits) - max(limits))
    return LAUNCH_MICROS + cycles / device.clock_hz * 1e6


def _gathered_bytes(problem: Problem, row_bytes: int) -> float:
    """Return the bytes that nonzeros gather from the L2 cache, one piece of a row of B each.

    The cache delivers whole sectors. Several short rows of B lie in one sector, and neighbouring nonzeros of a row of
    A read it once; their number is estimated for random places.
    """
    matrix = problem.matrix
    if row_bytes >= SECTOR_BYTES:
        return float(matrix.nnz) * row_bytes
    together = SECTOR_BYTES / row_bytes
    cells = matrix.m * matrix.k
    sectors = cells / together * (1.0 - (1.0 - matrix.nnz / max(1, cells)) ** together)
    return float(SECTOR_BYTES * min(matrix.nnz, sectors))


def pack_plan(problem: Problem, plan: RowsPlan) -> PackedKernel:
    """Return the kernel of a plan of csr or hyb."""
    dtype, epilogue, lane = problem.dtype, problem.epilogue, Lane(plan.vector, plan.team)
    blocks = blocks_of(problem.matrix, plan, _ends(problem.matrix, plan))
    grid = grid_of(ceil_div(problem.n, lane.cols), len(blocks.firsts))
    heads = _heads(problem.matrix, plan, blocks, grid[1] * grid[2])
    settings = {
        "VECTOR": lane.vector,
        "TEAM": lane.team,
        "GROUP": plan.group,
        "WORDS": entry_words(problem),
        "WARPS": plan.warps,
        "FIRST_ARRAY": 2 * PLACES * 8,
    }
    return PackedKernel(
        entry="lospmm_rows",
        source=source_of_template("rows", settings, dtype=dtype, epilogue=epilogue),
        data=pack((problem.n,), (heads, _steps(problem, plan, blocks, heads[:, 1])), epilogue=epilogue),
        launch=Launch(grid, WARP * plan.warps, 4 * plan.warps * lane.cols),
        registers=REGISTERS,
        cols=lane.cols,
        dtype=dtype,
        takes_residual=epilogue.residual,
    )


def _heads(matrix: SparseMatrix, plan: RowsPlan, blocks: BlockedRows, count: int) -> NDArray[np.int32]:
    """Return what each of ``count`` blocks, some of them without rows, begins with, (count, 4 + teams)."""
    rows, _ = by_falling_length(matrix)
    later = np.cumsum(blocks.steps - 1)
    own = np.arange(teams_of(plan)) >> blocks.shifts[:, np.newaxis]
    places = np.minimum(blocks.firsts[:, np.newaxis] + own, matrix.m - 1)
    found = np.zeros((count, 4 + teams_of(plan)), dtype=np.int32)
    found[:, 4:] = -1
    used = found[: len(later)]
    used[:, 0], used[:, 1], used[:, 2] = blocks.steps, count + later - (blocks.steps - 1), blocks.shifts
    used[:, 4:] = np.where(own < blocks.rows[:, np.newaxis], rows[places], -1)
    return found


def _steps(problem: Problem, plan: RowsPlan, blocks: BlockedRows, seconds: NDArray[np.int32]) -> NDArray[np.uint32]:
    """Return the entries of all steps, (steps, teams, group, ``entry_words``), padded with zeros."""
    matrix, words = problem.matrix, entry_words(problem)
    source, places = _places(matrix, plan, blocks, seconds)
    total = len(seconds) + int((blocks.steps - 1).sum())
    found = np.zeros((total, teams_of(plan), plan.group, words), dtype=np.uint32)
    entries = found.reshape(-1, words)
    columns, weights = matrix.indices[source].astype(np.uint32), matrix.data[source]
    if words == 1:
        halves = problem.dtype.to_storage(weights).view(np.uint16).astype(np.uint32)
        entries[places, 0] = columns | halves << np.uint32(16)
    else:
        entries[places, 0] = columns
        entries[places, 1] = problem.dtype.rounded(weights).view(np.uint32)
    return found


def _places(
    matrix: SparseMatrix, plan: RowsPlan, blocks: BlockedRows, seconds: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the nonzeros in the order of their rows, by number, and each one's entry in all steps; (nnz,).

    Numbers of nonzeros are 32-bit: a matrix of a language model may have 10**8.
    """
    rows, lengths = by_falling_length(matrix)
    within = np.arange(matrix.nnz, dtype=np.int32) - np.repeat((np.cumsum(lengths) - lengths).astype(np.int32), lengths)
    source = np.repeat(matrix.indptr[rows].astype(np.int32), lengths) + within
    own = np.repeat(np.arange(len(blocks.rows), dtype=np.int32), blocks.rows)  # of each row its block
    first_team = np.arange(matrix.m) - blocks.firsts[own] << blocks.shifts[own]
    block, group = np.repeat(own, lengths), within // np.int32(plan.group)
    shift = np.repeat(blocks.shifts.astype(np.int32)[own], lengths)
    step = group >> shift
    step = np.where(step == 0, block, seconds[block] + step - 1)
    group &= (np.int32(1) << shift) - np.int32(1)
    team = np.repeat(first_team.astype(np.int32), lengths) + group
    places = step.astype(np.int64) * teams_of(plan)
    places += team
    places *= plan.group
    places += within % np.int32(plan.group)
    return source, places
