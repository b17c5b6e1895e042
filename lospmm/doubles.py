"""Candidates whose threads compute two columns of 16 bits each, with sums in float32 (``words.DOUBLE``).

One load brings both columns, so there are half as many, and it is loads that are short where B has 16 bits; but as much
code for half the rows. So they are faster where most of a tile is loads, at 98 % zeros (docs/decisions/0022). They have
tile sizes of their own: with two sums for a row a tile is about half as high. The rank model learned of one column to a
thread, so the estimate puts them in order, and they are timed by rounds of their own.
"""

from dataclasses import replace

import numpy as np

from lospmm.candidates import Candidates
from lospmm.constraints import MAX_WASTED_COLUMNS, Subject, block_counts, runs, wasted_columns
from lospmm.model import COLUMN_GROUPS, Problem, Schedule, TileSize, ceil_div
from lospmm.space import PREFETCHES, Space, differs
from lospmm.words import DOUBLE, takes_double


def doubled(problem: Problem, space: Space) -> Candidates:
    """Those of the tilings that ``space`` has left, of one block to a tile, that the hardware has room for; none where
    a thread cannot have two columns. ``problem`` is that of a search (``words.in_words``)."""
    left = Candidates.of(space.survivors)
    if not takes_double(problem) or not len(left):
        return left.take(np.zeros(0, dtype=np.int64))
    warp, device = problem.device.warp_size, problem.device
    rows, first = np.unique(left.rows, return_index=True)
    widest = min(device.threads_per_block, ceil_div(problem.n // DOUBLE.columns, warp) * warp)
    widths = np.arange(warp, widest + 1, warp)
    tiles = [TileSize(height, width) for height in rows.tolist() for width in widths.tolist()]
    sizes = Candidates.of_tiles(tiles, Schedule(PREFETCHES[0]))
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
