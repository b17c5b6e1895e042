"""Sections 3.2 to 3.4: what removes a tile size before anything is compiled, one pure function each.

A constraint says what it found of every tile size and what it allows; that one is refused is a value (``Verdict``),
kept for reports. To add one, write its function and add a row to ``CONSTRAINTS``; what a schedule alone may break is
in ``HARDWARE``.

The paper's three thresholds (half of the SMs, 0.25 and 0.25) and ours on dispatched tiles are rules of thumb: where a
matrix is so small, so uneven or so tall that no tile size meets one, it is moved to what the best tile sizes reach
(``relaxed``) instead of refusing every kernel. The limits of the hardware are never moved.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.dtype import FLOAT_BYTES
from lospmm.problem.problem import Problem, ceil_div
from lospmm.space.candidates import COLUMN_GROUPS, Ints, TileSize, Tiling, UnrolledPlans, block_rows, ceil_divs
from lospmm.space.occupancy import registers_of_block
from lospmm.space.registers import forecast_of_each

#: TH_row and TH_col of section 3.4.
MAX_ROW_IMBALANCE = 0.25
MAX_WASTED_COLUMNS = 0.25

#: Blocks along y and along z that CUDA allows (CUDA C++ Programming Guide, Technical Specifications per Compute
#: Capability).
MAX_GRID_HEIGHT = 65_535

#: 5,000 tiles take ptxas 6 s, 384 a tenth of one.
MAX_DISPATCHED_TILES = 4_096

Stage = Literal["registers", "utilization", "balance"]


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """What a constraint found of each candidate and what it allows: at most ``limit``, or at least ``limit``."""

    value: NDArray[Any]
    limit: float
    sense: Literal["at most", "at least"] = "at most"

    @property
    def holds(self) -> NDArray[np.bool_]:
        return self.value <= self.limit if self.sense == "at most" else self.value >= self.limit


@dataclass(frozen=True, slots=True)
class Subject:
    """What a constraint looks at: tile sizes with a schedule each, and tilings from the balance stage on, when the rows
    have been regrouped. ``splits`` are what a search may choose for ``Schedule.split_k``.
    """

    problem: Problem
    candidates: UnrolledPlans
    splits: tuple[int, ...] = (1,)


def thread_registers(subject: Subject) -> Bound:
    """Section 3.2: more registers than a thread can address would be spilled to memory."""
    device = subject.problem.device
    return Bound(forecast_of_each(subject.problem, subject.candidates), device.registers_per_thread)


def block_registers(subject: Subject) -> Bound:
    """Section 3.2: a block with more registers than the GPU gives one does not start."""
    candidates, device = subject.candidates, subject.problem.device
    per_thread = forecast_of_each(subject.problem, candidates)
    return Bound(registers_of_block(candidates.cols, per_thread, device), device.registers_per_block)


def long_row_registers(subject: Subject) -> Bound:
    """Both limits once more, when the rows are regrouped: then the long rows of each tile, with two sums each, are
    known (``sums``)."""
    candidates, device = subject.candidates, subject.problem.device
    per_thread = forecast_of_each(subject.problem, candidates)
    of_block = registers_of_block(candidates.cols, per_thread, device)
    return Bound(np.where(per_thread <= device.registers_per_thread, of_block, math.inf), device.registers_per_block)


def mailbox_bytes(subject: Subject) -> Bound:
    """A block with more shared memory than the GPU gives one does not start."""
    return Bound(mailbox_bytes_of_each(subject.candidates), subject.problem.device.shared_bytes_per_block)


def partial_warps(subject: Subject) -> Bound:
    """Section 3.3: threads beyond the last whole warp of a block."""
    return Bound(subject.candidates.cols % subject.problem.device.warp_size, 0)


def block_threads(subject: Subject) -> Bound:
    return Bound(subject.candidates.cols, subject.problem.device.threads_per_block)


def grid_height(subject: Subject) -> Bound:
    """The blocks along the longer of the grid's axes y and z (``ir.grid``), with the schedule's groups of columns."""
    problem, candidates = subject.problem, subject.candidates
    block_cols, group = ceil_divs(problem.n, candidates.block_cols), candidates.column_group
    groups = ceil_divs(block_cols, np.where(group == 0, block_cols, np.minimum(group, block_cols)))
    return Bound(np.maximum(_parts(problem, candidates), groups), MAX_GRID_HEIGHT)


def least_grid_height(subject: Subject) -> Bound:
    """The same with the groups that make it shortest."""
    regrouped = (subject.candidates.with_axis("column_group", group) for group in COLUMN_GROUPS)
    heights = [grid_height(replace(subject, candidates=candidates)).value for candidates in regrouped]
    return Bound(np.minimum.reduce(heights), MAX_GRID_HEIGHT)


def dispatched_tiles(subject: Subject) -> Bound:
    """The block rows that a kernel dispatches to, a function each: ptxas takes time that grows with their square."""
    return Bound(_parts(subject.problem, subject.candidates), MAX_DISPATCHED_TILES)


def idle_sms(subject: Subject) -> Bound:
    """Section 3.3, Equation 1: fewer blocks than half of the SMs leave too many of them idle.

    A tile size has the most blocks that a split which the hardware has room for gives it.
    """
    problem, most = subject.problem, block_counts(subject.problem, subject.candidates)
    for split in subject.splits:
        candidates = subject.candidates.with_axis("split_k", split)
        most = np.maximum(most, np.where(runs(problem, candidates), block_counts(problem, candidates), 0))
    return Bound(most, problem.device.sms / 2, "at least")


def row_imbalance(subject: Subject) -> Bound:
    """Section 3.4, COV_row: the coefficient of variation of the nonzeros of the tiles."""
    candidates = subject.candidates
    imbalances = np.array([_imbalance(tiling) for tiling in candidates.tilings], dtype=np.float64)
    return Bound(imbalances[candidates.tiling], MAX_ROW_IMBALANCE)


def _imbalance(tiling: Tiling) -> float:
    nnz = tiling.nnz
    return float(np.std(nnz) / np.mean(nnz)) if len(nnz) else 0.0


def wasted_columns(subject: Subject) -> Bound:
    """Section 3.4, WASTE_col: the share of padding in the columns of B."""
    n, cols = subject.problem.n, subject.candidates.block_cols
    padded = ceil_divs(n, cols) * cols
    return Bound((padded - n) / padded, MAX_WASTED_COLUMNS)


def block_count(problem: Problem, tile: TileSize) -> int:
    """Equation 1, block_num, with the rows that Algorithm 1 keeps and the blocks that write empty rows."""
    return block_rows(problem.matrix, tile.rows) * ceil_div(problem.n, tile.cols)


def block_counts(problem: Problem, candidates: UnrolledPlans) -> Ints:
    """``block_count`` of each, times the blocks that share a tile."""
    return _parts(problem, candidates) * ceil_divs(problem.n, candidates.block_cols)


def _parts(problem: Problem, candidates: UnrolledPlans) -> Ints:
    """The blocks along y: the parts of all tiles."""
    heights = range(1, int(candidates.rows.max(initial=0)) + 1)
    by_rows = np.array([0, *(block_rows(problem.matrix, rows) for rows in heights)])
    return by_rows[candidates.rows] * candidates.split_k


def mailbox_bytes_of_each(candidates: UnrolledPlans) -> Ints:
    """Shared memory of a block that shares its tile: what the others may send it, of the rows that it owns."""
    split = candidates.split_k
    return (split - 1) * ceil_divs(candidates.rows, split) * candidates.cols * FLOAT_BYTES


#: What a schedule may break in a tile size that satisfies every constraint: then its kernel does not start.
HARDWARE = (thread_registers, block_registers, grid_height, mailbox_bytes)


def runs(problem: Problem, candidates: UnrolledPlans) -> NDArray[np.bool_]:
    """Which of them the hardware has room for."""
    subject = Subject(problem, candidates)
    holds: NDArray[np.bool_] = np.logical_and.reduce([check(subject).holds for check in HARDWARE])
    return holds


@dataclass(frozen=True, slots=True)
class Constraint:
    stage: Stage
    check: Callable[[Subject], Bound]
    relaxed: float | None = None  # where nothing meets the limit: the factor between the best value and the new limit

    @property
    def name(self) -> str:
        return self.check.__name__

    def relax(self, best: float) -> float:
        """The limit that stands in where ``best`` is the best value and misses the paper's."""
        assert self.relaxed is not None
        return math.nextafter(best * self.relaxed, math.inf if self.relaxed > 1 else 0)


#: In the order in which they are applied; counts are reported per stage.
CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint("registers", thread_registers),
    Constraint("registers", block_registers),
    Constraint("utilization", partial_warps),
    Constraint("utilization", block_threads),
    Constraint("utilization", least_grid_height),
    Constraint("utilization", dispatched_tiles, relaxed=1.25),
    Constraint("utilization", idle_sms, relaxed=0.5),
    Constraint("balance", long_row_registers),
    Constraint("balance", row_imbalance, relaxed=1.25),
    Constraint("balance", wasted_columns, relaxed=1.25),
)
