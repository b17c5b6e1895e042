"""Candidates whose blocks compute several tiles, one after another (``Schedule.tiles_per_block``).

Blocks that do not all fit the GPU come in waves, and a block that has stored its tile leaves its SM idle until the next
one has loaded its first elements of B. One block for a tile of each wave goes on meanwhile: on an H200 that takes 3 to
9 % of the time (docs/decisions/0025). No estimate tells such candidates from the others, so they are not part of the
space: the fastest of it are timed with and without.
"""

from collections.abc import Sequence
from dataclasses import replace

from lospmm.candidates import Candidates, ceil_divs
from lospmm.estimate import work_of
from lospmm.model import Candidate, Problem


def chained(problem: Problem, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those of ``candidates`` whose blocks come in waves, with a block for the tiles of all of them."""
    if not candidates:
        return []
    work = work_of(problem, Candidates.of(candidates))
    waves = ceil_divs(work.blocks, work.resident).tolist()
    return [
        replace(candidate, schedule=replace(candidate.schedule, tiles_per_block=count))
        for candidate, count in zip(candidates, waves, strict=True)
        if count > 1 and candidate.schedule.split_k == 1 and len(candidate.tiling.tiles) >= count
    ]
