"""GroupCOO (Insum, arXiv:2510.17505): groups of equally many entries of a row, in one fused kernel.

A team of ``lanes`` threads takes consecutive groups; because all are of one length, it reads A in vectors, and its
loop has no tail. All blocks have about the same number of groups, and so have all teams of a block, whatever the rows'
lengths: the sums of a row that spans teams are added through shared memory, in a fixed order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.families.groups import make_groups, team_starts
from lospmm.families.lane import VECTOR_BYTES, WARP, grid_of
from lospmm.families.packed import PackedKernel, pack, source_of_template
from lospmm.families.traffic import LAUNCH_MICROS, Traffic, micros_of
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem, ceil_div
from lospmm.space.candidates import Ints, ceil_divs

GROUPS = (4, 8, 16, 32, 64)
WARPS = (4, 8, 16)
SHARES = (4, 16, 64)

#: The most entries with padding, relative to those without: longer groups are not tried.
MAX_PADDING = 2.0

#: Columns of a block.
WIDTHS = (32, 64, 128, 256)

#: Loads of B that a thread has in flight.
DEPTH = 8

#: Empty rows of C that a team writes.
EMPTY_ROWS = 8

#: Groups, and entries, are counted in 32 bits.
MAX_ENTRIES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class GroupCooPlan:
    """A plan: the length of groups, and the layout of teams."""

    group: int  # entries
    lanes: int  # threads of a team, side by side along a row of C
    vector: int  # columns of a thread
    warps: int  # of a block
    share: int  # groups of a team, unless a row alone has more for each

    @property
    def teams(self) -> int:
        """Teams of a block."""
        return self.warps * WARP // self.lanes

    @property
    def cols(self) -> int:
        """Columns of C of a block."""
        return self.lanes * self.vector


def refusal(problem: Problem) -> str | None:
    """Return why this family has no kernel for the problem, or None."""
    least = int(ceil_divs(problem.matrix.row_nnz, GROUPS[0]).sum()) * GROUPS[0]
    if least > MAX_ENTRIES:
        return f"more than {MAX_ENTRIES} entries"
    return None


def plans(problem: Problem) -> list[GroupCooPlan]:
    """Return plans whose vectors divide N, which aligns rows of B and C, and whose blocks fit N."""
    return [
        GroupCooPlan(group, lanes, vector, warps, share)
        for group in _group_lengths(problem)
        for lanes, vector in _widths(problem)
        for warps in WARPS
        for share in SHARES
    ]


def _group_lengths(problem: Problem) -> list[int]:
    """Return the group lengths that pad little; the shortest always."""
    lengths = problem.matrix.row_nnz
    padded = {length: int(ceil_divs(lengths, length).sum()) * length for length in GROUPS}
    limit = min(MAX_ENTRIES, MAX_PADDING * problem.matrix.nnz)
    return [length for length in GROUPS if length == GROUPS[0] or padded[length] <= limit]


def _widths(problem: Problem) -> list[tuple[int, int]]:
    """Return (lanes, vector) of blocks as wide as WIDTHS; for a smaller N, the narrowest that covers it."""
    size = problem.dtype.element_bytes
    widest = VECTOR_BYTES // size
    vector = max(width for width in (1, 2, 4, 8) if width <= widest and problem.n % width == 0)
    fits = [width for width in WIDTHS if 1 <= width // vector <= WARP]
    least = 1 << (problem.n - 1).bit_length()  # the power of two that is not below
    found = [width for width in fits if width < 2 * problem.n] or [least]
    return [(max(1, width // vector), vector) for width in found]


def forecast(problem: Problem, plans: Sequence[GroupCooPlan]) -> NDArray[np.float64]:
    """Predict microseconds of each plan: each entry reads a row of B, from L1 if a block reuses it enough."""
    counts = {group: ceil_divs(problem.matrix.row_nnz, group) for group in {plan.group for plan in plans}}
    return np.array([_micros(problem, plan, counts[plan.group]) for plan in plans])


#: Bytes that an SM reads from its L1 cache in a cycle; and the most bytes of a block's rows of B that stay there.
L1_BYTES_PER_CYCLE_AND_SM = 100.0
L1_BYTES = 128 << 10

#: Cycles of a block before its first element of B arrives and after its last; of a step, which loads columns and then
#: elements; and of adding another team's sum of the same row. Fitted by hand to 132 kernels on an H200
#: (``benchmarks.einsum``).
BLOCK_CYCLES = 1500.0
STEP_CYCLES = 600.0
PART_CYCLES = 60.0

#: A thread's registers, about: they decide how many blocks an SM has at a time.
REGISTERS = 80


def _micros(problem: Problem, plan: GroupCooPlan, counts: Ints) -> float:
    """Predict microseconds: the root of the sum of the squares of traffic, L1 and latency, as none hides the others."""
    matrix, size, device = problem.matrix, problem.dtype.element_bytes, problem.device
    groups, longest = int(counts.sum()), int(counts.max(initial=0))
    entries = groups * plan.group
    column_blocks = ceil_div(problem.n, plan.cols)
    columns = column_blocks * plan.cols
    threads = plan.warps * WARP
    blocks = max(1, ceil_div(groups, plan.teams * plan.share))
    apart = matrix.k * -np.expm1(entries / blocks * np.log1p(-1.0 / (matrix.k + 1)))  # rows of B that a block reads
    read = apart * blocks if apart * plan.cols * size <= L1_BYTES else entries
    of_a = (8 * entries + 4 * groups) * column_blocks
    traffic = Traffic(
        l2_bytes=read * columns * size + of_a,
        instructions=entries * columns * ((2 if size == 2 else 1) + 4 / plan.vector),
        threads=blocks * column_blocks * threads,
    )
    in_l1 = (entries * columns * size + of_a) / (L1_BYTES_PER_CYCLE_AND_SM * device.sms)
    steps = plan.group / min(plan.group, DEPTH) * STEP_CYCLES
    resident = min(device.threads_per_sm, device.registers_per_sm // REGISTERS) // threads
    waves = blocks * column_blocks / (device.sms * max(1, resident))
    shared_rows = min(plan.teams, float(counts.mean()) / plan.share)
    of_block = BLOCK_CYCLES + plan.share * steps + shared_rows * PART_CYCLES
    late = max((waves + 0.5) * of_block, BLOCK_CYCLES + longest / plan.teams * steps)
    bounds = micros_of(problem, traffic) - LAUNCH_MICROS, in_l1 / device.clock_hz * 1e6, late / device.clock_hz * 1e6
    return LAUNCH_MICROS + float(np.linalg.norm(bounds))


def pack_plan(problem: Problem, plan: GroupCooPlan) -> PackedKernel:
    """Return the kernel of a plan."""
    matrix, dtype, epilogue = problem.matrix, problem.dtype, problem.epilogue
    groups = make_groups(matrix.indptr, plan.group, plan.teams * plan.share)
    starts = team_starts(groups, plan.teams)
    # Padding repeats the row's last entry with weight 0: its element of B is in the cache.
    first = groups.places[:, :1]
    is_there = groups.places >= 0
    places = np.where(is_there, groups.places, np.maximum.accumulate(np.where(is_there, groups.places, first), axis=1))
    weights = np.where(is_there, dtype.rounded(matrix.data)[places], np.float32(0)) if len(places) else np.zeros(0)
    columns = matrix.indices[places] if len(places) else np.zeros(0)
    blocks = len(groups.blocks) - 1
    empty_blocks = ceil_div(len(groups.empty_rows), plan.teams * EMPTY_ROWS)
    threads = plan.warps * WARP
    settings = {
        "GROUP": plan.group,
        "DEPTH": min(plan.group, DEPTH),
        "LANES": plan.lanes,
        "VECTOR": plan.vector,
        "TEAMS": plan.teams,
        "EMPTY_ROWS": EMPTY_ROWS,
    }
    return PackedKernel(
        entry="lospmm_group_coo",
        source=source_of_template("group_coo", settings, dtype=dtype, epilogue=epilogue),
        data=pack(
            (problem.n, blocks, len(groups.empty_rows)),
            (
                starts.astype(np.uint32),
                groups.rows,
                columns.astype(np.int32),
                weights.astype(np.float32),
                groups.empty_rows,
            ),
            epilogue=epilogue,
        ),
        launch=Launch(
            grid_of(ceil_div(problem.n, plan.cols), blocks + empty_blocks),
            threads,
            4 * plan.vector * threads + 4 * plan.teams,
        ),
        registers=min(112, problem.device.registers_per_block // threads),
        cols=plan.cols,
        dtype=dtype,
        takes_residual=epilogue.residual,
    )
