"""Part of hyb (SparseTIR, section 4.1): rows of A in buckets of similar length, padded to one width.

Bucket 2^i has the rows with more than 2^(i-1) entries and at most 2^i, and is as wide as the longest of them. Each
has a schedule of its own: as many teams of threads share a row as leave ``work`` entries to each, of one warp or of
all warps of a block, which add up their sums in a fixed order. All buckets are one launch, the widest first.
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
from lospmm.problem.problem import Launch, Problem, ceil_div

WARPS = (4, 16)
GROUPS = (2, 4, 8)
WORK = (4, 16, 64)

#: Rows below this many entries share a bucket.
LEAST = 4

#: Numbers of a bucket in the data: the first place, the end of its places, where its lists begin, groups, slices.
PART_NUMBERS = 8

REGISTERS = 128

#: Files that the template needs.
PARTS = ("gather.cuh", "ell.cuh")


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


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """One bucket: its rows and how teams share them."""

    rows: NDArray[np.int64]
    groups: int  # of each row
    slices: int  # teams that share a row

    @property
    def walks(self) -> int:
        """Walks of a bucket: one for each row and each team that shares it."""
        return len(self.rows) * self.slices

    @property
    def longest(self) -> int:
        """Groups that a team walks."""
        return ceil_div(self.groups, self.slices)


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


def buckets_of(problem: Problem, plan: Buckets) -> list[Bucket]:
    """Return the buckets of a plan, widest first; together they have every row once."""
    found = []
    for rows, width in _by_width(problem.matrix):
        slices = 1
        while slices < plan.teams and slices * plan.work < width:
            slices *= 2
        found.append(Bucket(rows, ceil_div(width, plan.group), slices))
    return found


@lru_cache(maxsize=4)
def _by_width(matrix: SparseMatrix) -> tuple[tuple[NDArray[np.int64], int], ...]:
    """Return the rows of each bucket and the entries of its longest row; the same for all plans."""
    lengths = matrix.row_nnz
    power = np.ceil(np.log2(np.maximum(lengths, LEAST))).astype(np.int64)
    power[lengths == 0] = -1
    every = [np.flatnonzero(power == one) for one in sorted(set(power.tolist()), reverse=True)]
    return tuple((rows, int(lengths[rows].max())) for rows in every)


def forecast(problem: Problem, plans: Sequence[Buckets]) -> NDArray[np.float64]:
    """Predict the microseconds of each plan, (plans,)."""
    found = []
    for plan in plans:
        buckets = buckets_of(problem, plan)
        found.append(
            gather_micros(
                problem,
                plan.lane,
                entry_words=entry_words(problem),
                group=plan.group,
                entries=float(sum(len(one.rows) * one.groups * plan.group for one in buckets)),
                walks=float(sum(one.walks for one in buckets)),
                groups=float(sum(one.walks * one.longest for one in buckets)),
                shared_walks=float(sum(one.walks for one in buckets if one.slices > 1)),
                longest=float(max(one.longest for one in buckets)),
            )
        )
    return np.array(found)


def pack_plan(problem: Problem, plan: Buckets) -> PackedKernel:
    """Return the kernel of a plan."""
    dtype, epilogue = problem.dtype, problem.epilogue
    buckets = buckets_of(problem, plan)
    rows = np.concatenate([one.rows for one in buckets])
    numbers = np.zeros((len(buckets), PART_NUMBERS), dtype=np.int64)
    starts, blocks = np.empty(len(rows), dtype=np.int64), []
    place = lists = 0
    for at, one in enumerate(buckets):
        end = place + len(one.rows)
        numbers[at, :5] = place, end, lists, one.groups, one.slices
        starts[place:end] = (lists + np.arange(len(one.rows)) * one.groups) * plan.group
        firsts = np.arange(place, end, plan.teams // one.slices)
        blocks.append(np.stack([np.full(len(firsts), at), firsts], axis=1))
        place, lists = end, lists + len(one.rows) * one.groups
    table = np.concatenate(blocks)
    grid = grid_of(ceil_div(problem.n, plan.lane.cols), len(table))
    surplus = grid[1] * grid[2] - len(table)
    table = np.concatenate([table, np.full((surplus, 2), -1)]).astype(np.int32)
    entries = pack_lists(problem, rows, starts, lists * plan.group)
    settings = {**common_settings(problem, plan.lane, plan.group), "WARPS": plan.warps}
    return PackedKernel(
        entry="lospmm_hyb_buckets",
        source=source_of_template(
            "hyb_buckets", settings, dtype=dtype, epilogue=epilogue, parts=("gather.cuh", "ell.cuh")
        ),
        data=pack((problem.n,), (rows.astype(np.int32), table, numbers, entries), epilogue=epilogue),
        launch=Launch(grid, WARP * plan.warps, 4 * plan.warps * plan.lane.cols),
        registers=REGISTERS,
        cols=plan.lane.cols,
        dtype=dtype,
        takes_residual=epilogue.residual,
    )
