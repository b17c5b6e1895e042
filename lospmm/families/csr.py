"""Rows of A in CSR, read at run time: any matrix size and any N (row splitting, as in Sputnik).

A warp has as many rows as there is room for beside the columns of C. Several teams of threads may share the entries of
a row, and add their sums at the end: N of 1 to 16 needs that. Rows are sorted by falling length, so that those of a
warp, and the blocks that run at the same time, have similar work (Gale et al. 2020, "row swizzle").
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.families.lists import (
    WARP,
    Lane,
    by_falling_length,
    common_settings,
    entry_words,
    grid_of,
    lanes,
    pack_lists,
)
from lospmm.families.packed import PackedKernel, pack, source_of_template
from lospmm.families.traffic import gather_micros
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem, ceil_div

WARPS = (4, 8)

#: Entries that a thread reads at once, with their rows of B in flight together.
GROUPS = (2, 4, 8)

REGISTERS = 128


@dataclass(frozen=True, slots=True)
class CsrPlan:
    """A plan: the layout of rows over threads."""

    vector: int  # columns next to each other that a thread computes
    team: int  # threads side by side in a row of C
    slices: int  # teams that share a row
    group: int  # entries that a team reads at once
    warps: int  # of a block

    @property
    def lane(self) -> Lane:
        """Layout of a row of C over threads."""
        return Lane(self.vector, self.team)

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.warps * WARP // (self.team * self.slices)


def plans(problem: Problem) -> list[CsrPlan]:
    """Return plans with no more slices than the longest row has groups."""
    longest = int(problem.matrix.row_nnz.max(initial=0))
    return [
        CsrPlan(lane.vector, lane.team, slices, group, warps)
        for lane in lanes(problem)
        for slices in (1, 2, 4, 8, 16, 32)
        for group in GROUPS
        for warps in WARPS
        if lane.team * slices <= WARP and (slices == 1 or slices * group < 2 * longest)
    ]


def forecast(problem: Problem, plans: Sequence[CsrPlan]) -> NDArray[np.float64]:
    """Predict microseconds of each plan: each nonzero reads a row of B from L2, group after group."""
    lengths = problem.matrix.row_nnz
    found = []
    for plan in plans:
        unit = plan.group * plan.slices
        groups = -(-lengths // unit)  # of a team
        found.append(
            gather_micros(
                problem,
                plan.lane,
                entry_words=entry_words(problem),
                group=plan.group,
                entries=float(groups.sum()) * unit,
                walks=float(len(lengths) * plan.slices),
                groups=float(groups.sum()) * plan.slices,
                shared_walks=float(len(lengths) * plan.slices * (plan.slices > 1)),
                longest=float(groups.max(initial=0)),
            )
        )
    return np.array(found)


def pack_plan(problem: Problem, plan: CsrPlan) -> PackedKernel:
    """Return the kernel of a plan."""
    matrix, dtype, epilogue = problem.matrix, problem.dtype, problem.epilogue
    rows = by_falling_length(problem)
    unit = plan.group * plan.slices
    groups = np.zeros(matrix.m + 1, dtype=np.int64)
    np.cumsum(-(-matrix.row_nnz[rows] // unit) * plan.slices, out=groups[1:])
    lists = pack_lists(problem, rows, groups[:-1] * plan.group, int(groups[-1]) * plan.group)
    settings = {**common_settings(problem, plan.lane, plan.group), "SLICES": plan.slices, "WARPS": plan.warps}
    grid = grid_of(ceil_div(problem.n, plan.lane.cols), ceil_div(matrix.m, plan.rows))
    return PackedKernel(
        entry="lospmm_csr",
        source=source_of_template("csr", settings, dtype=dtype, epilogue=epilogue, parts=("gather.cuh",)),
        data=pack((matrix.m, problem.n), (rows.astype(np.int32), groups, lists), epilogue=epilogue),
        launch=Launch(grid, WARP * plan.warps),
        registers=REGISTERS,
        cols=plan.lane.cols,
        dtype=dtype,
        takes_residual=epilogue.residual,
    )
