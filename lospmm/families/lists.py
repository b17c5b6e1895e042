"""Lists of entries, a column and a weight each, as ``templates/gather.cuh`` reads them: what csr and hyb share."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.dtype import Dtype
from lospmm.problem.problem import Problem, ceil_div

#: Columns that 16 bits name.
MAX_NARROW_COLUMNS = 1 << 16

#: Bytes of the widest load.
VECTOR_BYTES = 16

#: Blocks along y or z that CUDA allows.
MAX_GRID_SIDE = 65_535

WARP = 32


@dataclass(frozen=True, slots=True)
class Lane:
    """How a row of C is laid over threads: ``team`` of them have ``vector`` columns each, side by side."""

    vector: int
    team: int

    @property
    def cols(self) -> int:
        return self.team * self.vector


def lanes(problem: Problem) -> list[Lane]:
    """Vectors that divide N, so that every row of B and C is aligned to them, and as many threads as N has work for."""
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
    """32-bit words of an entry: one where the weight has 16 bits and so has the column."""
    return 1 if problem.dtype.element_bytes == 2 and problem.matrix.k <= MAX_NARROW_COLUMNS else 2


def weight_words(dtype: Dtype, weights: NDArray[np.float32]) -> NDArray[np.uint32]:
    """The bits of the weights as the multiplication takes them: 16 of a 16-bit type, else of float32."""
    if dtype.element_bytes == 2:
        return dtype.to_storage(weights).view(np.uint16).astype(np.uint32)
    return dtype.rounded(weights).view(np.uint32)


def pack_lists(problem: Problem, rows: NDArray[np.int64], starts: NDArray[np.int64], total: int) -> NDArray[np.uint32]:
    """The nonzeros of ``rows`` from the entries ``starts`` on, one row each; (total, ``entry_words``), padded by 0."""
    matrix, words = problem.matrix, entry_words(problem)
    found: NDArray[np.uint32] = np.zeros((total, words), dtype=np.uint32)
    lengths = matrix.row_nnz[rows]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    source = np.repeat(matrix.indptr[rows], lengths) + within
    target = np.repeat(starts, lengths) + within
    columns, weights = matrix.indices[source].astype(np.uint32), matrix.data[source]
    if words == 1:
        found[target, 0] = columns | weight_words(problem.dtype, weights) << np.uint32(16)
    else:
        found[target, 0] = columns
        found[target, 1] = problem.dtype.rounded(weights).view(np.uint32)
    return found


def by_falling_length(problem: Problem) -> NDArray[np.int64]:
    """The rows, the longest first; those of one length in their order."""
    return np.argsort(-problem.matrix.row_nnz, kind="stable")


def grid_of(columns: int, blocks: int) -> tuple[int, int, int]:
    """``columns`` blocks along N, and at least ``blocks`` in y and z together."""
    depth = max(1, ceil_div(blocks, MAX_GRID_SIDE))
    return columns, max(1, ceil_div(blocks, depth)), depth


def common_settings(problem: Problem, lane: Lane, group: int) -> dict[str, Any]:
    return {"VECTOR": lane.vector, "TEAM": lane.team, "GROUP": group, "WORDS": entry_words(problem)}
