"""hyb (SparseTIR, section 4.1) without column partitions: rows of A in buckets, padded to the longest of each.

Bucket 2^i has the rows with more than 2^(i-1) entries and at most 2^i, and is as wide as the longest of them. Each
bucket has its own number of teams of threads that share a row, so that a team has about ``work`` entries; teams are of
one warp or of all warps of a block, and their sums are added in a fixed order. All buckets are one launch, the widest
first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lospmm.families.lists import WARP, Lane, common_settings, entry_words, grid_of, lanes, pack_lists
from lospmm.families.packed import PackedKernel, pack, source_of_template
from lospmm.families.traffic import gather_micros
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem, ceil_div

WARPS = (4, 16)
GROUPS = (2, 4, 8)
WORK = (4, 16, 64)

#: Rows below this many entries share a bucket.
LEAST = 4

#: Numbers of a bucket in the data: the first place, the end of its places, where its lists begin, groups, slices.
BUCKET_NUMBERS = 5

REGISTERS = 128


@dataclass(frozen=True, slots=True)
class Buckets:
    """A plan: vector loads, teams of threads and their work."""

    vector: int
    team: int
    group: int
    work: int  # entries of a team, about
    warps: int

    @property
    def lane(self) -> Lane:
        """Layout of a row of C over threads."""
        return Lane(self.vector, self.team)

    @property
    def teams(self) -> int:
        """Teams of a block."""
        return self.warps * WARP // self.team


def plans(problem: Problem) -> list[Buckets]:
    """Return the plans, including the widest vectors in small teams: more teams then share a long row."""
    wide = lanes(problem)
    narrow = Lane(wide[0].vector, 8)
    return [
        Buckets(lane.vector, lane.team, group, work, warps)
        for lane in ([*wide, narrow] if wide[0].team > narrow.team else wide)
        for group in GROUPS
        for work in WORK
        for warps in WARPS
        if work >= group and (group < GROUPS[-1] or lane.vector <= 4)
    ]


@lru_cache(maxsize=4)
def rows_of_buckets(matrix: SparseMatrix) -> tuple[NDArray[np.int64], ...]:
    """Return the rows of each bucket, that of the longest rows first; together they have every row once."""
    power = np.ceil(np.log2(np.maximum(matrix.row_nnz, LEAST))).astype(np.int64)
    power[matrix.row_nnz == 0] = -1
    return tuple(np.flatnonzero(power == one) for one in np.unique(power)[::-1])


@lru_cache(maxsize=4)
def _sizes(matrix: SparseMatrix) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of each bucket and the entries of its longest row, (buckets,) each."""
    buckets, lengths = rows_of_buckets(matrix), matrix.row_nnz
    return np.array([len(rows) for rows in buckets]), np.array([lengths[rows].max() for rows in buckets])


def schedules(matrix: SparseMatrix, plan: Buckets) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the groups of each row of a bucket, and the teams that share it, a power of two, (buckets,) each."""
    _, widths = _sizes(matrix)
    shares = np.maximum(1, -(-widths // plan.work))
    return -(-widths // plan.group), np.minimum(plan.teams, 1 << np.ceil(np.log2(shares)).astype(np.int64))


def forecast(problem: Problem, plans: Sequence[Buckets]) -> NDArray[np.float64]:
    """Predict the microseconds of each plan, (plans,)."""
    rows, _ = _sizes(problem.matrix)
    found = []
    for plan in plans:
        groups, slices = schedules(problem.matrix, plan)
        walks, longest = rows * slices, -(-groups // slices)
        found.append(
            gather_micros(
                problem,
                plan.lane,
                entry_words=entry_words(problem),
                group=plan.group,
                entries=float(rows @ groups) * plan.group,
                walks=float(walks.sum()),
                groups=float(walks @ longest),
                shared_walks=float(walks[slices > 1].sum()),
                longest=float(longest.max()),
            )
        )
    return np.array(found)


def pack_plan(problem: Problem, plan: Buckets) -> PackedKernel:
    """Return the kernel of a plan."""
    dtype, epilogue = problem.dtype, problem.epilogue
    buckets = rows_of_buckets(problem.matrix)
    groups, slices = (each.tolist() for each in schedules(problem.matrix, plan))
    rows = np.concatenate(buckets)
    numbers = np.zeros((len(buckets), BUCKET_NUMBERS), dtype=np.int64)
    starts, blocks = np.empty(len(rows), dtype=np.int64), []
    place = lists = 0
    for at, own in enumerate(buckets):
        end = place + len(own)
        numbers[at] = place, end, lists, groups[at], slices[at]
        starts[place:end] = (lists + np.arange(len(own)) * groups[at]) * plan.group
        firsts = np.arange(place, end, plan.teams // slices[at])
        blocks.append(np.stack([np.full(len(firsts), at), firsts], axis=1))
        place, lists = end, lists + len(own) * groups[at]
    table = np.concatenate(blocks)
    grid = grid_of(ceil_div(problem.n, plan.lane.cols), len(table))
    surplus = grid[1] * grid[2] - len(table)
    table = np.concatenate([table, np.full((surplus, 2), -1)]).astype(np.int32)
    entries = pack_lists(problem, rows, starts, lists * plan.group)
    settings = {**common_settings(problem, plan.lane, plan.group), "WARPS": plan.warps}
    return PackedKernel(
        entry="lospmm_hyb",
        source=source_of_template("hyb", settings, dtype=dtype, epilogue=epilogue, parts=("gather.cuh",)),
        data=pack((problem.n,), (rows.astype(np.int32), table, numbers, entries), epilogue=epilogue),
        launch=Launch(grid, WARP * plan.warps, 4 * plan.warps * plan.lane.cols),
        registers=REGISTERS,
        cols=plan.lane.cols,
        dtype=dtype,
        takes_residual=epilogue.residual,
    )
