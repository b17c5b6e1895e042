"""Candidates whose blocks compute several tiles, one after another (``Schedule.tiles_per_block``).

Blocks that do not all fit the GPU come in waves, and a block that has stored its tile leaves its SM idle until the next
one has loaded its first elements of B. One block for a tile of each wave goes on meanwhile: on an H200 that takes 5 to
8 % less time (docs/decisions/0025). No estimate tells such candidates from the others, so they are not part of the
space: the fastest of it are timed with and without.
"""

from collections.abc import Sequence
from dataclasses import replace

from lospmm.candidates import Candidates, ceil_divs
from lospmm.estimate import work_of
from lospmm.model import Candidate, Problem, ceil_div


def chained(problem: Problem, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those of ``candidates`` whose blocks come in waves, with a block for a tile of each. Left out are those that then
    still need more than one wave: a block more than fits, and all take twice as long."""
    if not candidates:
        return []
    work = work_of(problem, Candidates.of(candidates))
    waves = ceil_divs(work.blocks, work.resident).tolist()
    found = []
    for candidate, count, resident in zip(candidates, waves, work.resident.tolist(), strict=True):
        tiling = candidate.tiling
        block_rows = ceil_div(len(tiling.tiles), count) + tiling.block_rows - len(tiling.tiles)
        block_cols = candidate.tile.cols * candidate.schedule.thread_words
        blocks = block_rows * ceil_div(problem.n, block_cols)
        if count > 1 and candidate.schedule.split_k == 1 and blocks <= resident * problem.device.sms:
            schedule = replace(candidate.schedule, tiles_per_block=count)
            found.append(replace(candidate, schedule=schedule))
    return found
