"""Layouts of a row of C over threads, and of blocks over a grid."""

import math
from dataclasses import dataclass

from lospmm.problem.problem import Problem, ceil_div

#: Bytes of the widest load.
VECTOR_BYTES = 16

#: Blocks along y or z that CUDA allows.
MAX_GRID_SIDE = 65_535

WARP = 32


@dataclass(frozen=True, slots=True)
class Lane:
    """Layout of a row of C over threads: ``team`` threads with ``vector`` adjacent columns each."""

    vector: int
    team: int

    @property
    def cols(self) -> int:
        """Columns of C of a team."""
        return self.team * self.vector


def lanes(problem: Problem) -> list[Lane]:
    """Return lanes whose vectors divide N, which aligns rows of B and C, and whose teams suit N."""
    size = problem.dtype.element_bytes
    widest = math.gcd(problem.n, VECTOR_BYTES // size)
    found = []
    for vector in (widest >> shift for shift in range(3) if widest >> shift):
        team = 1
        while team < WARP and team * vector < problem.n:
            team *= 2
        found.append(Lane(vector, team))
    return found


def grid_of(columns: int, blocks: int) -> tuple[int, int, int]:
    """Return a grid of ``columns`` blocks along N, and at least ``blocks`` in y and z together."""
    depth = max(1, ceil_div(blocks, MAX_GRID_SIDE))
    return columns, max(1, ceil_div(blocks, depth)), depth
