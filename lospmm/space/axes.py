"""Candidates of tile sizes of their own, which the space does not name: of two columns to a thread.

``doubled``: threads compute two columns of 16 bits each, with sums in float32 (``lanes.DOUBLE``). One load brings both
columns, so there are half as many, and it is loads that are short where B has 16 bits; but as much code for half the
rows. So they are faster where most of a tile is loads, at 98 % zeros (docs/decisions/0022). With two sums for a row a
tile is about half as high. The rank model learned of one column to a thread, so the estimate puts them in order, and
they are timed by rounds of their own.

``walked_twice``: threads walk their code twice (``walks``). No estimate tells what that gains, so the few that an
estimate puts first are timed behind the rounds (docs/decisions/0031).
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.lanes import DOUBLE, SINGLE, takes_double
from lospmm.problem.problem import Problem, ceil_div
from lospmm.space.candidates import COLUMN_GROUPS, Ints, Schedule, TileSize, UnrolledPlan, UnrolledPlans, ceil_divs
from lospmm.space.constraints import MAX_WASTED_COLUMNS, Subject, block_counts, runs, wasted_columns
from lospmm.space.estimate import RATES, costs_of, micros_of, work_of
from lospmm.space.explore import PREFETCHES, Space, differs
from lospmm.space.occupancy import registers_of_block
from lospmm.space.registers import seconds_of_each
from lospmm.space.walks import KEPT_BYTES, KEPT_WORDS, REACH, WALKS, registers_of_passes, takes_two_passes

#: Elements of B in flight where code is walked twice: multiples of the scoreboards that loads have.
WALKED_PREFETCHES = (70, 60, 50, 40, 35, 30, 25, 20, 15, 10)

#: Between the threads of two sizes that are worth timing both: the estimate tells heights better than widths.
APART = 1.25

#: How neighbours may be grouped (``Schedule.column_group``): 2, or all column blocks of a tile. 1 took a fifth longer.
WALKED_GROUPS = (2, 0)


def doubled(problem: Problem, space: Space) -> UnrolledPlans:
    """Those of the tilings that ``space`` has left, of one block to a tile, that the hardware has room for; none where
    a thread cannot have two columns. ``problem`` is that of a search (``lanes.in_lanes``)."""
    left = UnrolledPlans.of(space.survivors)
    if not takes_double(problem) or not len(left):
        return left.take(np.zeros(0, dtype=np.int64))
    warp, device = problem.device.warp_size, problem.device
    rows, first = np.unique(left.rows, return_index=True)
    widest = min(device.threads_per_block, ceil_div(problem.n // DOUBLE.columns, warp) * warp)
    widths = np.arange(warp, widest + 1, warp)
    tiles = [TileSize(height, width) for height in rows.tolist() for width in widths.tolist()]
    sizes = UnrolledPlans.of_tiles(tiles, Schedule(PREFETCHES[0]))
    sizes = replace(sizes, tilings=left.tilings, tiling=np.repeat(left.tiling[first], len(widths)))
    schedules = [
        Schedule(prefetch, None, group, thread_words=DOUBLE.columns)
        for prefetch in PREFETCHES
        for group in COLUMN_GROUPS
    ]
    every = sizes.with_each(schedules)
    every = every.take(differs(problem, every.block_cols, every.column_group))
    every = every.take(runs(problem, every) & (block_counts(problem, every) >= space.least_blocks))
    waste = wasted_columns(Subject(problem, every)).value
    return every.take(waste <= max(MAX_WASTED_COLUMNS, waste.min(initial=1)))


def walked_twice(problem: Problem, sizes: UnrolledPlans, fastest: UnrolledPlan) -> list[tuple[UnrolledPlan, float]]:
    """Candidates with the tile sizes of ``sizes``, and microseconds of each by the estimate, where the blocks of the
    ``fastest`` known come in waves: the best sizes, of numbers of threads that are APART, the best of them first, in
    groups of 2; that one also with all column blocks of a tile in one group."""
    if not len(sizes) or not takes_two_passes(problem, Schedule(WALKED_PREFETCHES[0])):
        return []
    work = work_of(problem, UnrolledPlans.of([fastest]))
    if int(work.blocks[0]) <= int(work.resident[0]):
        return []
    tiles = _tiles(problem, sizes)
    if not len(tiles):
        return []
    micros = _estimates(problem, tiles)
    best: list[int] = []
    for at in np.argsort(micros, kind="stable").tolist():
        if all(max(tiles.cols[[at, other]]) >= APART * min(tiles.cols[[at, other]]) for other in best):
            best.append(at)
    found = [(_grouped(tiles[at], WALKED_GROUPS[0]), float(micros[at])) for at in best]
    return [found[0], *((_grouped(tiles[best[0]], group), found[0][1]) for group in WALKED_GROUPS[1:]), *found[1:]]


def _grouped(candidate: UnrolledPlan, group: int) -> UnrolledPlan:
    return replace(candidate, schedule=replace(candidate.schedule, column_group=group))


def _tiles(problem: Problem, candidates: UnrolledPlans) -> UnrolledPlans:
    """Each tile size that fits twice its columns, with as many elements of B in flight as there are registers for."""
    sizes = candidates.rows * (int(candidates.cols.max()) + 1) + candidates.cols
    _, first = np.unique(sizes, return_index=True)
    tiles = candidates.take(first)
    sums = tiles.rows + seconds_of_each(problem, tiles)
    most = _most_in_flight(problem, sums, tiles.cols)
    needed = ceil_divs(sums, KEPT_WORDS) + 1
    fits = (most > 0) & (needed * KEPT_BYTES * tiles.cols <= problem.device.shared_bytes_per_block)
    fits &= WALKS * tiles.cols <= problem.n
    found = [
        UnrolledPlan(TileSize(one.tile.rows, one.tile.cols), Schedule(int(prefetch), walks=WALKS), one.tiling)
        for one, prefetch in ((tiles[int(at)], most[at]) for at in np.flatnonzero(fits))
    ]
    return UnrolledPlans.of(found)


def _most_in_flight(problem: Problem, sums: Ints, cols: Ints) -> Ints:
    """The largest of WALKED_PREFETCHES that leaves room for so many sums, of rows of B that there are and that one
    address reaches; 0 where none does."""
    device, most = problem.device, np.zeros(len(sums), np.int64)
    reached = (REACH - 1) // (problem.n * SINGLE.stored_bytes)
    for prefetch in sorted(one for one in WALKED_PREFETCHES if one <= min(problem.matrix.k, reached)):
        registers = registers_of_passes(sums, prefetch)
        room = (registers <= device.registers_per_thread) & (
            registers_of_block(cols, registers, device) <= device.registers_per_block
        )
        most[room] = prefetch
    return most


def _estimates(problem: Problem, tiles: UnrolledPlans) -> NDArray[np.float64]:
    """Microseconds: of half the columns, all of it twice, but for the code, which is fetched once."""
    half = replace(problem, n=problem.n // WALKS)
    costs = costs_of(half, work_of(half, tiles.with_axis("column_group", WALKED_GROUPS[0])), RATES)
    twice = type(costs)(*(WALKS * cost for cost in costs))
    return micros_of(problem, twice._replace(fetch=costs.fetch))
