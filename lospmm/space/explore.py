"""The search space of section 3.1: all tile sizes, filtered by the constraints.

``explore`` is the funnel of Figure 3. It checks tile sizes with the least prefetch, which needs the fewest registers;
``widen`` then combines each survivor with every schedule that fits.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.problem import Problem, ceil_div
from lospmm.space.candidates import (
    COLUMN_GROUPS,
    Ints,
    Refusal,
    Schedule,
    TileSize,
    Tiling,
    UnrolledPlan,
    UnrolledPlans,
    ceil_divs,
)
from lospmm.space.constraints import CONSTRAINTS, Bound, Constraint, Stage, Subject, block_counts, runs

#: The most rows of a tile: no GPU lets a thread address more registers, and each row takes one.
MAX_ROWS = 256

#: The most 64-bit words that regrouping compares for all M1 in total: some 20 s on one core (benchmarks/reordering.py).
MAX_COMPARISONS = 2.5e10

#: Values of ``Schedule.prefetch``. Each load in flight takes a register; on an H200, 48 loads per warp beat 16.
PREFETCHES = (4, 8, 16, 24, 32, 48, 72)

#: One more value, for blocks of few threads: others have enough loads in flight without it (docs/decisions/0026).
DEEP, DEEP_THREADS = 144, 192

SHALLOWEST = Schedule(prefetch=PREFETCHES[0])

#: Returns the tiling for each M1, given values of M1.
Regroup = Callable[[Sequence[int]], Mapping[int, Tiling]]


@dataclass(frozen=True, slots=True)
class Space:
    """An explored search space: each tile size is a survivor or has a verdict."""

    survivors: Sequence[UnrolledPlan]
    verdicts: tuple[Refusal, ...]
    relaxed: tuple[str, ...]  # constraints whose limit was relaxed, as no tile size met it
    splits: tuple[int, ...] = (1,)  # values that ``Schedule.split_k`` may have
    least_blocks: float = 0  # the limit of idle_sms, relaxed or not

    @property
    def size(self) -> int:
        """The number of tile sizes before any constraint."""
        return len(self.survivors) + len(self.verdicts)

    def after(self, stage: Stage) -> int:
        """Return the number of tile sizes left after a stage and those before it."""
        stages = list(dict.fromkeys(constraint.stage for constraint in CONSTRAINTS))
        done = {c.name for c in CONSTRAINTS if stages.index(c.stage) <= stages.index(stage)}
        return self.size - sum(verdict.constraint in done for verdict in self.verdicts)


def tile_sizes(problem: Problem, cols: Iterable[int] | None = None) -> list[TileSize]:
    """Return every tile size (M1, N1) of the space.

    M1 is any integer up to MAX_ROWS; N1 any multiple of a warp that a block can have and N can use. With very many rows
    M1 is taken in steps: the time of regrouping grows with the square of the rows. ``cols`` overrides the values of N1
    (the paper's Figure 3 counts partial warps too).
    """
    matrix, warp = problem.matrix, problem.device.warp_size
    widest = min(problem.device.threads_per_block, ceil_div(problem.n, warp) * warp)
    widths = range(warp, widest + 1, warp) if cols is None else cols
    heights = range(1, min(matrix.m, MAX_ROWS) + 1, _step(matrix))
    return [TileSize(rows, width) for width in widths for rows in heights]


def _step(matrix: SparseMatrix) -> int:
    """Return the step between two values of M1: above 1 if regrouping for every M1 would take minutes."""
    words = ceil_div(matrix.k, 64)
    comparisons = matrix.filled_rows**2 * words * math.log(MAX_ROWS)  # rows x tiles of all M1 x words of a mask
    doublings = math.ceil(math.log2(max(comparisons / MAX_COMPARISONS, 1)))
    return min(1 << doublings, MAX_ROWS // 8)


def explore(
    problem: Problem,
    regroup: Regroup,
    *,
    base: Schedule = SHALLOWEST,
    cols: Iterable[int] | None = None,
    splits: tuple[int, ...] = (1,),
) -> Space:
    """Return the space: all tile sizes, with every constraint applied in turn.

    ``regroup`` is called once, with the values of M1 that reach the balance stage. ``base`` is the schedule to check
    with, ``cols`` as in ``tile_sizes``, ``splits`` the values that ``Schedule.split_k`` may have.
    """
    candidates = UnrolledPlans.of_tiles(tile_sizes(problem, cols), base)
    verdicts: list[Refusal] = []
    limits: dict[str, float] = {}
    relaxed: list[str] = []
    regrouped = False
    for constraint in CONSTRAINTS:
        if constraint.stage == "balance" and not regrouped:
            candidates = candidates.with_tilings(regroup(np.unique(candidates.rows).tolist()))
            regrouped = True
        bound = constraint.check(Subject(problem, candidates, splits))
        limit = _relaxed_limit(constraint, bound)
        if limit is not None:
            relaxed.append(constraint.name)
            bound = replace(bound, limit=limit)
        limits[constraint.name] = bound.limit
        verdicts += _verdicts(constraint, bound, candidates)
        candidates = candidates.take(bound.holds)
    return Space(candidates, tuple(verdicts), tuple(relaxed), splits, limits["idle_sms"])


def _verdicts(constraint: Constraint, bound: Bound, candidates: UnrolledPlans) -> list[Refusal]:
    refused = ~bound.holds
    figures = (candidates.rows, candidates.cols, bound.value)
    columns = (column[refused].tolist() for column in figures)
    return [
        Refusal(TileSize(rows, cols), constraint.name, value, bound.limit)
        for rows, cols, value in zip(*columns, strict=True)
    ]


def widen(problem: Problem, space: Space) -> UnrolledPlans:
    """Return each survivor with every useful schedule that fits the hardware."""
    schedules = [
        Schedule(prefetch, group, split)
        for prefetch in (*PREFETCHES, DEEP)
        for group in COLUMN_GROUPS
        for split in space.splits
    ]
    every = UnrolledPlans.of(space.survivors).with_each(schedules)
    another = differs(problem, every.block_cols, every.column_group)
    another &= (every.cols <= DEEP_THREADS) | (every.by_schedule(lambda schedule: schedule.prefetch) < DEEP)
    return every.take(another & _of_use(problem, space, every) & runs(problem, every))


def differs(problem: Problem, cols: Ints | int, group: Ints | int) -> NDArray[np.bool_]:
    """Return whether ``column_group`` gives a grid of its own: with few column blocks, some coincide.

    ``cols`` are the columns of a block, in words.
    """
    found: NDArray[np.bool_] = np.asarray(group) < np.maximum(ceil_divs(problem.n, cols), 2)
    return found


def _of_use(problem: Problem, space: Space, candidates: UnrolledPlans) -> NDArray[np.bool_]:
    """Return whether a candidate's split gives enough blocks, and half the split too few that multiply for all SMs."""
    blocks, split = block_counts(problem, candidates), candidates.split_k
    tiles = candidates.by_tiling(lambda tiling: tiling.count) * ceil_divs(problem.n, candidates.block_cols)
    needed: NDArray[np.bool_] = (split == 1) | (tiles * split // 2 < problem.device.sms)
    return needed & (blocks >= space.least_blocks)


def _relaxed_limit(constraint: Constraint, bound: Bound) -> float | None:
    """Return the relaxed limit of a rule of thumb that no candidate meets; None to keep the limit."""
    if constraint.relaxed is None or not len(bound.value) or bound.holds.any():
        return None
    best = bound.value.max() if bound.sense == "at least" else bound.value.min()
    return math.nextafter(float(best) * constraint.relaxed, math.inf if constraint.relaxed > 1 else 0)
