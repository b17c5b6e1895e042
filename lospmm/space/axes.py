"""Candidates outside the widened space: two words per thread, and two passes over a tile's code.

Both kinds have tile sizes of their own.

``wide_plans``: a thread computes two 16-bit columns, with float32 sums (``lanes.DOUBLE``). One load brings both
columns. That halves the number of loads, which limits kernels with a 16-bit B, but a tile needs as much code for half
as many rows. It pays off where most of a tile is loads, at 98 % zeros (docs/decisions/0022). A row takes two sums, so
tiles are about half as high. The rank model was trained on one column per thread, so the estimate ranks these.

``two_pass_plans``: a thread runs its code twice (``walks``). The estimate cannot predict the gain, so the few that are
predicted fastest are timed (docs/decisions/0031).
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

#: Elements of B in flight in two passes: multiples of the number of scoreboards for loads (``walks.SCOREBOARDS``).
WALKED_PREFETCHES = (70, 60, 50, 40, 35, 30, 25, 20, 15, 10)

#: Least ratio between the widths of two tile sizes that are both timed: the estimate ranks heights better than widths.
APART = 1.25

#: Column groups of two-pass plans (``Schedule.column_group``): 2, or 0 for all. 1 was a fifth slower.
WALKED_GROUPS = (2, 0)


def wide_plans(problem: Problem, space: Space) -> UnrolledPlans:
    """Return the candidates with two words per thread that fit the hardware.

    They have the tilings left in ``space``, without split-K. ``problem`` is in words (``lanes.in_lanes``); empty if its
    threads cannot have two columns.
    """
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
        Schedule(prefetch, group, thread_words=DOUBLE.columns) for prefetch in PREFETCHES for group in COLUMN_GROUPS
    ]
    every = sizes.with_each(schedules)
    every = every.take(differs(problem, every.block_cols, every.column_group))
    every = every.take(runs(problem, every) & (block_counts(problem, every) >= space.least_blocks))
    waste = wasted_columns(Subject(problem, every)).value
    return every.take(waste <= max(MAX_WASTED_COLUMNS, waste.min(initial=1)))


def two_pass_plans(problem: Problem, sizes: UnrolledPlans, fastest: UnrolledPlan) -> list[tuple[UnrolledPlan, float]]:
    """Return candidates that run their code twice, with estimated microseconds, predicted fastest first.

    Their tile sizes are those of ``sizes``, with widths at least a factor of APART from each other. All have column
    groups of 2; the best also comes with all column blocks of a tile in one group. Empty if none fits, or if the blocks
    of ``fastest``, the fastest candidate known, run in one wave: two passes then gain nothing.
    """
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
    """Return a two-pass candidate for each tile size that fits, with the largest prefetch that fits."""
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
    """Return the largest of WALKED_PREFETCHES with registers left for ``sums``, (tiles,); 0 if none.

    It is at most k, and a load's immediate offset must reach the last row of B in flight.
    """
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
    """Return the estimated microseconds of two passes, (tiles,).

    Each pass has the costs of half the columns; the code is fetched once.
    """
    half = replace(problem, n=problem.n // WALKS)
    costs = costs_of(half, work_of(half, tiles.with_axis("column_group", WALKED_GROUPS[0])), RATES)
    twice = type(costs)(*(WALKS * cost for cost in costs))
    return micros_of(problem, twice._replace(fetch=costs.fetch))
