"""Lists of entries, a column and a weight each, as ``templates/gather.cuh`` reads them.

csr and hyb share them.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.problem import Problem, ceil_div

#: Columns that 16 bits can number.
MAX_NARROW_COLUMNS = 1 << 16

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


def entry_words(problem: Problem) -> int:
    """Return the 32-bit words of an entry: one if the weight and the column have 16 bits each."""
    return 1 if problem.dtype.element_bytes == 2 and problem.matrix.k <= MAX_NARROW_COLUMNS else 2


def pack_lists(problem: Problem, rows: NDArray[np.int64], starts: NDArray[np.int64], total: int) -> NDArray[np.uint32]:
    """Return the nonzeros of ``rows``, (total, ``entry_words``), from entries ``starts`` on, zero-padded."""
    matrix, words = problem.matrix, entry_words(problem)
    found: NDArray[np.uint32] = np.zeros((total, words), dtype=np.uint32)
    lengths = matrix.row_nnz[rows]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    source = np.repeat(matrix.indptr[rows], lengths) + within
    target = np.repeat(starts, lengths) + within
    columns, weights = matrix.indices[source].astype(np.uint32), matrix.data[source]
    if words == 1:
        halves = problem.dtype.to_storage(weights).view(np.uint16).astype(np.uint32)
        found[target, 0] = columns | halves << np.uint32(16)
    else:
        found[target, 0] = columns
        found[target, 1] = problem.dtype.rounded(weights).view(np.uint32)
    return found


def by_falling_length(problem: Problem) -> NDArray[np.int64]:
    """Return the rows, longest first; rows of equal length keep their order."""
    return np.argsort(-problem.matrix.row_nnz, kind="stable")


def grid_of(columns: int, blocks: int) -> tuple[int, int, int]:
    """Return a grid of ``columns`` blocks along N, and at least ``blocks`` in y and z together."""
    depth = max(1, ceil_div(blocks, MAX_GRID_SIDE))
    return columns, max(1, ceil_div(blocks, depth)), depth


def common_settings(problem: Problem, lane: Lane, group: int) -> dict[str, Any]:
    """Return the template's settings that csr and hyb share."""
    return {"VECTOR": lane.vector, "TEAM": lane.team, "GROUP": group, "WORDS": entry_words(problem)}
