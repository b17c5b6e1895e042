"""Section 3.1: every tile size worth naming, and what the constraints leave of them.

``explore`` is the funnel of Figure 3. Tile sizes are judged with the shallowest schedule, which needs the fewest
registers; ``widen`` then gives a survivor every schedule that fits it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lospmm.constraints import (
    CONSTRAINTS,
    Bound,
    Constraint,
    Stage,
    Subject,
    block_registers,
    grid_height,
    thread_registers,
)
from lospmm.matrix import SparseMatrix
from lospmm.model import COLUMN_GROUPS, Candidate, Problem, Schedule, TileSize, Tiling, Verdict, ceil_div

#: No thread addresses more registers than this on any GPU, so no tile of more rows can be computed: not worth naming.
MAX_ROWS = 256

#: Words that regrouping compares for all M1 together: some 20 s on one core (benchmarks/reordering.py).
MAX_COMPARISONS = 2.5e10

#: Loads in flight. Deep prefetch pays on recent GPUs (48 loads a warp beat 16 on an H200), at one register each.
PREFETCHES = (4, 8, 16, 24, 32, 48, 72)

SHALLOWEST = Schedule(prefetch=PREFETCHES[0])

#: What a deeper or another schedule may still break in a survivor.
_DEPTH_DECIDES = (thread_registers, block_registers)
_GROUP_DECIDES = (grid_height,)

#: How rows are put into tiles for each M1 that is asked for.
Regroup = Callable[[Sequence[int]], Mapping[int, Tiling]]


@dataclass(frozen=True, slots=True)
class Space:
    """The outcome of a search space: verdicts and survivors together are every tile size that was named."""

    survivors: tuple[Candidate, ...]
    verdicts: tuple[Verdict, ...]
    relaxed: tuple[str, ...]  # constraints whose limit no tile size met, and that were moved

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
    problem: Problem, regroup: Regroup, *, base: Schedule = SHALLOWEST, cols: Iterable[int] | None = None
) -> Space:
    """Apply every constraint in turn. ``regroup`` is asked once, for the values of M1 that reach the balance stage."""
    subjects = [Subject(problem, tile, base) for tile in tile_sizes(problem, cols)]
    verdicts: list[Verdict] = []
    relaxed: list[str] = []
    tilings: Mapping[int, Tiling] | None = None
    for constraint in CONSTRAINTS:
        if constraint.stage == "balance" and tilings is None:
            tilings = regroup(sorted({subject.tile.rows for subject in subjects}))
            subjects = [replace(subject, tiling=tilings[subject.tile.rows]) for subject in subjects]
        bounds = [constraint.check(subject) for subject in subjects]
        limit = _relaxed_limit(constraint, bounds)
        if limit is not None:
            relaxed.append(constraint.name)
            bounds = [replace(bound, limit=limit) for bound in bounds]
        verdicts += [
            Verdict(subject.tile, constraint.name, bound.value, bound.limit)
            for subject, bound in zip(subjects, bounds, strict=True)
            if not bound.holds
        ]
        subjects = [subject for subject, bound in zip(subjects, bounds, strict=True) if bound.holds]
    survivors = [Candidate(s.tile, s.schedule, s.tiling) for s in subjects if s.tiling is not None]
    return Space(tuple(survivors), tuple(verdicts), tuple(relaxed))


def widen(problem: Problem, candidate: Candidate, lockstep: int = 0) -> list[Candidate]:
    """``candidate`` with every schedule of that ``lockstep`` that keeps it within the registers and the grid."""

    def fits(schedule: Schedule, checks: Iterable[Callable[[Subject], Bound]]) -> bool:
        subject = Subject(problem, candidate.tile, schedule)
        return all(check(subject).holds for check in checks)

    prefetches = [prefetch for prefetch in PREFETCHES if fits(Schedule(prefetch), _DEPTH_DECIDES)]
    shallow = SHALLOWEST.prefetch
    groups = [
        group for group in _groups(problem, candidate.tile) if fits(Schedule(shallow, None, group), _GROUP_DECIDES)
    ]
    return [
        Candidate(candidate.tile, Schedule(prefetch, None, group, lockstep), candidate.tiling)
        for prefetch in prefetches
        for group in groups
    ]


def _groups(problem: Problem, tile: TileSize) -> list[int]:
    """The values of ``column_group`` that make different grids: fewer column blocks have fewer of them."""
    columns = ceil_div(problem.n, tile.cols)
    return [group for group in COLUMN_GROUPS if group < max(columns, 2)]


#: How many tile sizes on either side, along each of its axes, are neighbours.
REACH = 2


def neighbours(
    problem: Problem, survivors: Sequence[Candidate], candidate: Candidate, locksteps: Sequence[int]
) -> list[Candidate]:
    """One step from ``candidate`` along one axis: the nearest tile sizes that survived, and its other schedules."""
    tile, schedule = candidate.tile, candidate.schedule
    near = _nearest([c for c in survivors if c.tile.cols == tile.cols], tile, lambda size: size.rows)
    near += _nearest([c for c in survivors if c.tile.rows == tile.rows], tile, lambda size: size.cols)
    found = [replace(other, schedule=schedule) for other in near]
    depths = sorted({*PREFETCHES, schedule.prefetch})
    at = depths.index(schedule.prefetch)
    others = [replace(schedule, prefetch=depth) for depth in (*depths[max(at - 1, 0) : at], *depths[at + 1 : at + 2])]
    others += [replace(schedule, column_group=group) for group in _groups(problem, tile)]
    others = [other for other in others if other != schedule]
    others += [replace(schedule, lockstep=lockstep) for lockstep in locksteps if lockstep != schedule.lockstep]
    found += [replace(candidate, schedule=other) for other in others]
    checks = (*_DEPTH_DECIDES, *_GROUP_DECIDES)
    return [c for c in found if all(check(Subject(problem, c.tile, c.schedule)).holds for check in checks)]


def _nearest(candidates: Sequence[Candidate], tile: TileSize, axis: Callable[[TileSize], int]) -> list[Candidate]:
    ordered = sorted(candidates, key=lambda candidate: axis(candidate.tile))
    below = [candidate for candidate in ordered if axis(candidate.tile) < axis(tile)]
    above = [candidate for candidate in ordered if axis(candidate.tile) > axis(tile)]
    return below[-REACH:] + above[:REACH]


def _relaxed_limit(constraint: Constraint, bounds: Sequence[Bound]) -> float | None:
    """The moved limit of a rule of thumb that nothing meets; None where the limit stands."""
    if constraint.relaxed is None or not bounds or any(bound.holds for bound in bounds):
        return None
    best = max if bounds[0].sense == "at least" else min
    return constraint.relax(best(bound.value for bound in bounds))
