"""Sections 3.2 to 3.4: what removes a tile size before anything is compiled, one pure function each.

A constraint says what it found and what it allows; that a tile size is refused is a value (``Verdict``), kept for
reports. To add one, write its function and add a row to ``CONSTRAINTS``.

The paper's three thresholds (half of the SMs, 0.25 and 0.25) and ours on dispatched tiles are rules of thumb: where a
matrix is so small, so uneven or so tall that no tile size meets one, it is moved to what the best tile sizes reach
(``relaxed``) instead of refusing every kernel. The limits of the hardware are never moved.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lospmm.ir import grid
from lospmm.model import COLUMN_GROUPS, Problem, Schedule, TileSize, Tiling, block_rows, ceil_div
from lospmm.occupancy import registers_of_block
from lospmm.registers import forecast_registers

#: TH_row and TH_col of section 3.4.
MAX_ROW_IMBALANCE = 0.25
MAX_WASTED_COLUMNS = 0.25

#: Blocks along y and along z that CUDA allows (CUDA C++ Programming Guide, Technical Specifications per Compute
#: Capability).
MAX_GRID_HEIGHT = 65_535

#: 5,000 tiles take ptxas 6 s, 384 a tenth of one.
MAX_DISPATCHED_TILES = 4_096

Stage = Literal["registers", "utilization", "balance"]


@dataclass(frozen=True, slots=True)
class Bound:
    """What a constraint found and what it allows: at most ``limit``, or at least ``limit``."""

    value: float
    limit: float
    sense: Literal["at most", "at least"] = "at most"

    @property
    def holds(self) -> bool:
        return self.value <= self.limit if self.sense == "at most" else self.value >= self.limit


@dataclass(frozen=True, slots=True)
class Subject:
    """What a constraint looks at; ``tiling`` is there from the balance stage on, when the rows have been regrouped."""

    problem: Problem
    tile: TileSize
    schedule: Schedule
    tiling: Tiling | None = None


def thread_registers(subject: Subject) -> Bound:
    """Section 3.2: more registers than a thread can address would be spilled to memory."""
    device = subject.problem.device
    return Bound(forecast_registers(subject.tile.rows, subject.schedule, device), device.registers_per_thread)


def block_registers(subject: Subject) -> Bound:
    """Section 3.2: a block with more registers than the GPU gives one does not start."""
    device = subject.problem.device
    per_thread = forecast_registers(subject.tile.rows, subject.schedule, device)
    return Bound(registers_of_block(subject.tile.cols, per_thread, device), device.registers_per_block)


def partial_warps(subject: Subject) -> Bound:
    """Section 3.3: threads beyond the last whole warp of a block."""
    return Bound(subject.tile.cols % subject.problem.device.warp_size, 0)


def block_threads(subject: Subject) -> Bound:
    return Bound(subject.tile.cols, subject.problem.device.threads_per_block)


def grid_height(subject: Subject) -> Bound:
    """The blocks along the longer of the grid's axes y and z, with the schedule's groups of columns."""
    problem, tile = subject.problem, subject.tile
    rows = block_rows(problem.matrix, tile.rows)
    _, y, z = grid(rows, problem.n, tile.cols, subject.schedule.column_group)
    return Bound(max(y, z), MAX_GRID_HEIGHT)


def least_grid_height(subject: Subject) -> Bound:
    """The same with the groups that make it shortest."""
    schedules = (replace(subject.schedule, column_group=group) for group in COLUMN_GROUPS)
    return min(
        (grid_height(replace(subject, schedule=schedule)) for schedule in schedules),
        key=lambda bound: bound.value,
    )


def dispatched_tiles(subject: Subject) -> Bound:
    """The block rows that a kernel dispatches to, a function each: ptxas takes time that grows with their square."""
    return Bound(block_rows(subject.problem.matrix, subject.tile.rows), MAX_DISPATCHED_TILES)


def idle_sms(subject: Subject) -> Bound:
    """Section 3.3, Equation 1: fewer blocks than half of the SMs leave too many of them idle."""
    return Bound(block_count(subject.problem, subject.tile), subject.problem.device.sms / 2, "at least")


def row_imbalance(subject: Subject) -> Bound:
    """Section 3.4, COV_row: the coefficient of variation of the nonzeros of the tiles."""
    assert subject.tiling is not None, "the balance stage comes after the rows are regrouped"
    nnz = subject.tiling.nnz
    return Bound(float(np.std(nnz) / np.mean(nnz)) if len(nnz) else 0.0, MAX_ROW_IMBALANCE)


def wasted_columns(subject: Subject) -> Bound:
    """Section 3.4, WASTE_col: the share of padding in the columns of B."""
    n, cols = subject.problem.n, subject.tile.cols
    padded = ceil_div(n, cols) * cols
    return Bound((padded - n) / padded, MAX_WASTED_COLUMNS)


def block_count(problem: Problem, tile: TileSize) -> int:
    """Equation 1, block_num, with the rows that Algorithm 1 keeps and the blocks that write empty rows."""
    return block_rows(problem.matrix, tile.rows) * ceil_div(problem.n, tile.cols)


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
    Constraint("balance", row_imbalance, relaxed=1.25),
    Constraint("balance", wasted_columns, relaxed=1.25),
)
