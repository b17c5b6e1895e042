"""Constraints that remove tile sizes before anything is compiled (sections 3.2 to 3.4).

A constraint returns a ``Bound``: its value of every tile size, and the limit. A removed tile size becomes a
``candidates.Refusal``, kept for reports. To add a constraint, write its function and add a row to ``CONSTRAINTS``;
add it to ``HARDWARE`` too if it depends on the schedule.

The paper's three thresholds (half of the SMs, 0.25 and 0.25) and ours on dispatched tiles are rules of thumb. If a
matrix is so small, uneven or tall that no tile size meets one, the limit is relaxed to what the best tile sizes reach
(``Constraint.relaxed``, docs/decisions/0004). Hardware limits are never relaxed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.dtype import FLOAT_BYTES
from lospmm.problem.problem import Problem
from lospmm.space.candidates import (
    BARRIER_BYTES,
    COLUMN_GROUPS,
    Ints,
    UnrolledPlans,
    block_rows,
    ceil_divs,
)
from lospmm.space.occupancy import registers_of_block
from lospmm.space.registers import forecast_of_each

#: TH_row and TH_col of section 3.4.
MAX_ROW_IMBALANCE = 0.25
MAX_WASTED_COLUMNS = 0.25

#: Blocks along y and along z that CUDA allows (CUDA C++ Programming Guide, Technical Specifications per Compute
#: Capability).
MAX_GRID_HEIGHT = 65_535

#: ptxas takes 6 s for 5,000 tiles, 0.1 s for 384.
MAX_DISPATCHED_TILES = 4_096

Stage = Literal["registers", "utilization", "balance"]


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A constraint's value of each candidate, (candidates,), and the limit that it must not cross."""

    value: NDArray[Any]
    limit: float
    sense: Literal["at most", "at least"] = "at most"

    @property
    def holds(self) -> NDArray[np.bool_]:
        """Whether each candidate meets the limit, (candidates,)."""
        return self.value <= self.limit if self.sense == "at most" else self.value >= self.limit


@dataclass(frozen=True, slots=True)
class Subject:
    """What a constraint is applied to: the tile sizes of one problem, each with a schedule.

    From the balance stage on, the rows are regrouped and ``candidates`` have tilings. ``splits`` are the values of
    ``Schedule.split_k`` that a search may choose.
    """

    problem: Problem
    candidates: UnrolledPlans
    splits: tuple[int, ...] = (1,)


def thread_registers(subject: Subject) -> Bound:
    """Limit the registers per thread (section 3.2): above the device's limit they are spilled to memory."""
    device = subject.problem.device
    return Bound(forecast_of_each(subject.problem, subject.candidates), device.registers_per_thread)


def block_registers(subject: Subject) -> Bound:
    """Limit the registers per block (section 3.2): a block above the device's limit does not start."""
    candidates, device = subject.candidates, subject.problem.device
    per_thread = forecast_of_each(subject.problem, candidates)
    return Bound(registers_of_block(candidates.cols, per_thread, device), device.registers_per_block)


def long_row_registers(subject: Subject) -> Bound:
    """Apply both register limits again once the rows are regrouped.

    Only then are the long rows of each tile known, which take two sums each (``lospmm.problem.long_rows``). The value
    is the registers per block, infinite if a thread has too many.
    """
    candidates, device = subject.candidates, subject.problem.device
    per_thread = forecast_of_each(subject.problem, candidates)
    of_block = registers_of_block(candidates.cols, per_thread, device)
    return Bound(np.where(per_thread <= device.registers_per_thread, of_block, math.inf), device.registers_per_block)


def mailbox_bytes(subject: Subject) -> Bound:
    """Limit the shared memory per block, in bytes: a block above the device's limit does not start."""
    return Bound(mailbox_bytes_of_each(subject.candidates), subject.problem.device.shared_bytes_per_block)


def partial_warps(subject: Subject) -> Bound:
    """Allow only whole warps (section 3.3): the value is the threads beyond a block's last whole warp."""
    return Bound(subject.candidates.cols % subject.problem.device.warp_size, 0)


def block_threads(subject: Subject) -> Bound:
    """Limit the threads per block to the device's limit."""
    return Bound(subject.candidates.cols, subject.problem.device.threads_per_block)


def grid_height(subject: Subject) -> Bound:
    """Limit the blocks along y and z of the grid (``ir.grid``), with the schedule's column groups."""
    problem, candidates = subject.problem, subject.candidates
    block_cols, group = ceil_divs(problem.n, candidates.block_cols), candidates.column_group
    groups = ceil_divs(block_cols, np.where(group == 0, block_cols, np.minimum(group, block_cols)))
    return Bound(np.maximum(_parts(problem, candidates), groups), MAX_GRID_HEIGHT)


def least_grid_height(subject: Subject) -> Bound:
    """Limit the blocks along y and z as ``grid_height`` does, with the column groups that make it least."""
    regrouped = (subject.candidates.with_axis("column_group", group) for group in COLUMN_GROUPS)
    heights = [grid_height(replace(subject, candidates=candidates)).value for candidates in regrouped]
    return Bound(np.minimum.reduce(heights), MAX_GRID_HEIGHT)


def dispatched_tiles(subject: Subject) -> Bound:
    """Limit the block rows that a kernel dispatches to, each a function.

    The compile time of ptxas grows with their square.
    """
    return Bound(_parts(subject.problem, subject.candidates), MAX_DISPATCHED_TILES)


def idle_sms(subject: Subject) -> Bound:
    """Require at least half as many blocks as SMs (section 3.3, Equation 1), so that few SMs are idle.

    A tile size is credited with the most blocks of any of ``splits`` that fits the hardware.
    """
    problem, most = subject.problem, block_counts(subject.problem, subject.candidates)
    for split in subject.splits:
        candidates = subject.candidates.with_axis("split_k", split)
        most = np.maximum(most, np.where(runs(problem, candidates), block_counts(problem, candidates), 0))
    return Bound(most, problem.device.sms / 2, "at least")


def row_imbalance(subject: Subject) -> Bound:
    """Limit COV_row (section 3.4): the coefficient of variation of the tiles' nonzeros."""
    candidates = subject.candidates
    of_each = (tiling.nnz for tiling in candidates.tilings)
    imbalances = np.array([np.std(nnz) / np.mean(nnz) if len(nnz) else 0.0 for nnz in of_each], dtype=np.float64)
    return Bound(imbalances[candidates.tiling], MAX_ROW_IMBALANCE)


def wasted_columns(subject: Subject) -> Bound:
    """Limit WASTE_col (section 3.4): the share of padding in the columns of B."""
    n, cols = subject.problem.n, subject.candidates.block_cols
    padded = ceil_divs(n, cols) * cols
    return Bound((padded - n) / padded, MAX_WASTED_COLUMNS)


def block_counts(problem: Problem, candidates: UnrolledPlans) -> Ints:
    """Return block_num (Equation 1) of each candidate, (candidates,), blocks of empty rows included."""
    return _parts(problem, candidates) * ceil_divs(problem.n, candidates.block_cols)


def _parts(problem: Problem, candidates: UnrolledPlans) -> Ints:
    """Return the blocks along y, (candidates,): ``split_k`` for each block row."""
    return block_rows(problem.matrix, candidates.rows) * candidates.split_k


def mailbox_bytes_of_each(candidates: UnrolledPlans) -> Ints:
    """Return a block's shared memory in bytes, (candidates,): mailboxes if blocks share a tile, else 0.

    A mailbox holds a barrier, and what other blocks send.
    """
    return mail_bytes_of_each(candidates) + BARRIER_BYTES * (candidates.split_k > 1)


def mail_bytes_of_each(candidates: UnrolledPlans) -> Ints:
    """Return the bytes of the sums that other blocks send a block, of the rows that it owns, (candidates,)."""
    split = candidates.split_k
    return (split - 1) * ceil_divs(candidates.rows, split) * candidates.cols * FLOAT_BYTES


#: Constraints that a schedule may break though its tile size satisfies all: the kernel would not start.
HARDWARE = (thread_registers, block_registers, grid_height, mailbox_bytes)


def runs(problem: Problem, candidates: UnrolledPlans) -> NDArray[np.bool_]:
    """Return whether each candidate fits the hardware, (candidates,)."""
    subject = Subject(problem, candidates)
    holds: NDArray[np.bool_] = np.logical_and.reduce([check(subject).holds for check in HARDWARE])
    return holds


@dataclass(frozen=True, slots=True)
class Constraint:
    """A row of ``CONSTRAINTS``: a constraint, its stage, and how far its limit may be relaxed."""

    stage: Stage
    check: Callable[[Subject], Bound]
    relaxed: float | None = None  # the relaxed limit over the best value; None: never relaxed

    @property
    def name(self) -> str:
        """The name in reports: that of the function."""
        return self.check.__name__


#: All constraints, in the order in which they are applied. Counts are reported per stage.
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
