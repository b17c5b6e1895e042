"""Section 3.1: every tile size worth naming, and what the constraints leave of them.

``explore`` is the funnel of Figure 3. Tile sizes are judged with the shallowest schedule, which needs the fewest
registers; ``widen`` then gives a survivor every schedule that fits it.
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

#: No thread addresses more registers than this on any GPU, so no tile of more rows can be computed: not worth naming.
MAX_ROWS = 256

#: Words that regrouping compares for all M1 together: some 20 s on one core (benchmarks/reordering.py).
MAX_COMPARISONS = 2.5e10

#: Loads in flight. Deep prefetch pays on recent GPUs (48 loads a warp beat 16 on an H200), at one register each.
PREFETCHES = (4, 8, 16, 24, 32, 48, 72)

SHALLOWEST = Schedule(prefetch=PREFETCHES[0])

#: How rows are put into tiles for each M1 that is asked for.
Regroup = Callable[[Sequence[int]], Mapping[int, Tiling]]


@dataclass(frozen=True, slots=True)
class Space:
    """The outcome of a search space: verdicts and survivors together are every tile size that was named."""

    survivors: Sequence[UnrolledPlan]
    verdicts: tuple[Refusal, ...]
    relaxed: tuple[str, ...]  # constraints whose limit no tile size met, and that were moved
    splits: tuple[int, ...] = (1,)  # what ``Schedule.split_k`` may be
    least_blocks: float = 0  # the limit of idle_sms, where it stands or was moved to

    @property
    def size(self) -> int:
        return len(self.survivors) + len(self.verdicts)

    def after(self, stage: Stage) -> int:
        """Tile sizes left after a stage and those before it."""
        stages = list(dict.fromkeys(constraint.stage for constraint in CONSTRAINTS))
        done = {c.name for c in CONSTRAINTS if stages.index(c.stage) <= stages.index(stage)}
        return self.size - sum(verdict.constraint in done for verdict in self.verdicts)


def tile_sizes(problem: Problem, cols: Iterable[int] | None = None) -> list[TileSize]:
    """Every (M1, N1): M1 any integer, N1 each multiple of the warp that a block can have and N can use.

    Of a matrix of very many rows M1 is named in steps: regrouping takes time that grows with their square.

    ``cols`` names the values of N1 instead (the paper's Figure 3 counts partial warps too).
    """
    matrix, warp = problem.matrix, problem.device.warp_size
    widest = min(problem.device.threads_per_block, ceil_div(problem.n, warp) * warp)
    widths = range(warp, widest + 1, warp) if cols is None else cols
    heights = range(1, min(matrix.m, MAX_ROWS) + 1, _step(matrix))
    return [TileSize(rows, width) for width in widths for rows in heights]


def _step(matrix: SparseMatrix) -> int:
    """Between two values of M1: 1, or more where regrouping the rows for every one would take minutes."""
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
    """Apply every constraint in turn. ``regroup`` is asked once, for the values of M1 that reach the balance stage."""
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


def widen(problem: Problem, space: Space, lockstep: int = 0) -> UnrolledPlans:
    """Every survivor with every schedule of that ``lockstep`` that the hardware has room for and that is of use."""
    schedules = [
        Schedule(prefetch, None, group, lockstep, split)
        for prefetch in PREFETCHES
        for group in COLUMN_GROUPS
        for split in space.splits
    ]
    every = UnrolledPlans.of(space.survivors).with_each(schedules)
    another = differs(problem, every.block_cols, every.column_group)
    return every.take(another & _of_use(problem, space, every) & runs(problem, every))


def differs(problem: Problem, cols: Ints | int, group: Ints | int) -> NDArray[np.bool_]:
    """Whether ``column_group`` makes another grid: fewer column blocks have fewer of them."""
    found: NDArray[np.bool_] = np.asarray(group) < np.maximum(ceil_divs(problem.n, cols), 2)
    return found


def _of_use(problem: Problem, space: Space, candidates: UnrolledPlans) -> NDArray[np.bool_]:
    """Whether as many blocks to a tile give the GPU enough of them, and half as many would not give every SM one."""
    blocks, split = block_counts(problem, candidates), candidates.split_k
    needed: NDArray[np.bool_] = (split == 1) | (blocks // 2 < problem.device.sms)
    return needed & (blocks >= space.least_blocks)


def _relaxed_limit(constraint: Constraint, bound: Bound) -> float | None:
    """The moved limit of a rule of thumb that nothing meets; None where the limit stands."""
    if constraint.relaxed is None or not len(bound.value) or bound.holds.any():
        return None
    best = bound.value.max() if bound.sense == "at least" else bound.value.min()
    return constraint.relax(float(best))
