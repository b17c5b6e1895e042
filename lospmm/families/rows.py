"""The kernel of csr and hyb, which differ in how many teams of threads share a row: ``templates/rows.cu``.

Rows are sorted by falling length (Gale et al. 2020, "row swizzle"), so that those of a block, and the blocks that run
at the same time, have similar work. A block pads its rows to the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lospmm.families.lane import WARP, Lane, grid_of
from lospmm.families.packed import PLACES, PackedKernel, pack, source_of_template
from lospmm.families.traffic import gather_micros
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem, ceil_div

#: Columns that 16 bits can number.
MAX_NARROW_COLUMNS = 1 << 16

REGISTERS = 128


def entry_words(problem: Problem) -> int:
    """Return the 32-bit words of an entry: one if the weight and the column have 16 bits each."""
    return 1 if problem.dtype.element_bytes == 2 and problem.matrix.k <= MAX_NARROW_COLUMNS else 2


class Walk(Protocol):
    """A plan of csr or hyb."""

    @property
    def lane(self) -> Lane:
        """Layout of a row of C over threads."""

    @property
    def group(self) -> int:
        """Entries that a team reads at once."""

    @property
    def warps(self) -> int:
        """Warps of a block."""


def teams_of(plan: Walk) -> int:
    """Return the teams of a block."""
    return plan.warps * WARP // plan.lane.team


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


def blocks_of(matrix: SparseMatrix, plan: Walk, ends: Sequence[tuple[int, int]]) -> BlockedRows:
    """Return the blocks of a plan; ``ends`` has log2 of a row's teams and the end of its places, in order of places."""
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


def forecast_of(problem: Problem, plan: Walk, blocks: BlockedRows) -> float:
    """Predict microseconds: each nonzero reads a row of B from L2, group after group."""
    teams = blocks.rows << blocks.shifts
    groups = float(teams @ blocks.steps)
    return gather_micros(
        problem,
        plan.lane,
        entry_words=entry_words(problem),
        group=plan.group,
        entries=groups * plan.group,
        walks=float(teams.sum()),
        groups=groups,
        shared_walks=float(teams[blocks.shifts > 0].sum()),
        longest=float(blocks.steps.max(initial=0)),
    )


def kernel_of(problem: Problem, plan: Walk, blocks: BlockedRows) -> PackedKernel:
    """Return the kernel of a plan of csr or hyb."""
    dtype, epilogue, lane = problem.dtype, problem.epilogue, plan.lane
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


def _heads(matrix: SparseMatrix, plan: Walk, blocks: BlockedRows, count: int) -> NDArray[np.int32]:
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


def _steps(problem: Problem, plan: Walk, blocks: BlockedRows, seconds: NDArray[np.int32]) -> NDArray[np.uint32]:
    """Return the entries of all steps, (steps, teams, group, ``entry_words``), padded with zeros."""
    matrix, words = problem.matrix, entry_words(problem)
    rows, lengths = by_falling_length(matrix)
    within = np.arange(matrix.nnz) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    source = np.repeat(matrix.indptr[rows], lengths) + within
    own = np.repeat(np.arange(len(blocks.rows)), blocks.rows)  # of each row its block
    team = np.arange(matrix.m) - blocks.firsts[own] << blocks.shifts[own]
    block = np.repeat(own, lengths)
    group = within // plan.group
    step = group >> blocks.shifts[block]
    step = np.where(step == 0, block, seconds[block] + step - 1)
    team = np.repeat(team, lengths) + (group & (1 << blocks.shifts[block]) - 1)
    total = len(seconds) + int((blocks.steps - 1).sum())
    found = np.zeros((total, teams_of(plan), plan.group, words), dtype=np.uint32)
    columns, weights = matrix.indices[source].astype(np.uint32), matrix.data[source]
    place = step, team, within % plan.group
    if words == 1:
        halves = problem.dtype.to_storage(weights).view(np.uint16).astype(np.uint32)
        found[(*place, 0)] = columns | halves << np.uint32(16)
    else:
        found[(*place, 0)] = columns
        found[(*place, 1)] = problem.dtype.rounded(weights).view(np.uint32)
    return found
