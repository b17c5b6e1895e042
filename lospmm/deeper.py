"""Candidates with more elements of B in flight than the space has (``Schedule.prefetch``).

Blocks that run at the same time load the same rows of B: memory is asked for as many of them as one tile has in flight,
however many tiles there are. Tiles of few rows leave registers for more. The rank model has learned from no such
kernels, so they are not part of the space: the fastest of it are timed with and without (docs/decisions/0026).
"""

from collections.abc import Sequence
from dataclasses import replace

from lospmm.candidates import Candidates, ceil_divs
from lospmm.constraints import runs
from lospmm.estimate import work_of
from lospmm.model import Candidate, Problem, Schedule, TileSize

#: Elements of B in flight, beside those of the space.
PREFETCHES = (104, 144, 200)


def deepened(problem: Problem, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those of ``candidates`` that load more elements than they have in flight, with more, as long as that takes no
    more waves of blocks: the deepest first."""
    found: dict[tuple[TileSize, Schedule], Candidate] = {}
    for candidate in candidates:
        most = int(candidate.tiling.nnc.max(initial=0)) // candidate.schedule.split_k
        schedules = [candidate.schedule]
        for prefetch in PREFETCHES:
            if schedules[-1].prefetch < min(prefetch, most):
                schedules.append(replace(candidate.schedule, prefetch=prefetch))
        every = Candidates.of([replace(candidate, schedule=schedule) for schedule in schedules])
        work = work_of(problem, every)
        waves = ceil_divs(work.blocks, work.resident.clip(1)).tolist()
        fits = [*runs(problem, every)]
        deeper = [every[at] for at in range(len(schedules) - 1, 0, -1) if fits[at] and waves[at] == waves[0]]
        for one in deeper:  # two that differ in nothing else may lead to the same
            found.setdefault((one.tile, one.schedule), one)
    return list(found.values())
