"""Rows of A, each read by equally many teams of threads: any matrix size and any N (row splitting, as in Sputnik).

A warp has as many rows as there is room for beside the columns of C. Several teams may share the entries of a row, and
add their sums at the end: N of 1 to 16 needs that.
"""

from dataclasses import dataclass

from lospmm.families.lane import WARP, Lane, lanes
from lospmm.families.rows import BlockedRows, blocks_of
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.problem import Problem

WARPS = (4, 8)

#: Entries that a thread reads at once, with their rows of B in flight together.
GROUPS = (2, 4, 8)


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

    def blocks(self, matrix: SparseMatrix) -> BlockedRows:
        """Return blocks with ``slices`` teams for each row."""
        return blocks_of(matrix, self, [(self.slices.bit_length() - 1, matrix.m)])


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
