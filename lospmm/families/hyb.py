"""hyb (SparseTIR, section 4.1) without column partitions: rows of A in buckets by their length, a power of two.

Each bucket has its own number of teams of threads that share a row, so that a team has about ``work`` entries; teams
are of one warp or of all warps of a block. All buckets are one launch, that of the longest rows first.
"""

from dataclasses import dataclass

import numpy as np

from lospmm.families.lane import Lane, lanes
from lospmm.families.rows import BlockedRows, blocks_of, by_falling_length, teams_of
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.problem import Problem

WARPS = (4, 16)
GROUPS = (2, 4, 8)
WORK = (4, 8, 16, 64)


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

    def blocks(self, matrix: SparseMatrix) -> BlockedRows:
        """Return blocks with so many teams for a row, a power of two, that a team has at most ``work`` entries."""
        _, lengths = by_falling_length(matrix)
        shifts = range(teams_of(self).bit_length() - 1, -1, -1)
        ends = [int(np.searchsorted(-lengths, -(self.work << shift - 1))) for shift in shifts[:-1]]
        return blocks_of(matrix, self, list(zip(shifts, [*ends, len(lengths)], strict=True)))


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
