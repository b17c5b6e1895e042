"""Candidates with more elements of B in flight (``Schedule.prefetch``) than the space has, or than its steps leave.

Blocks that run at the same time load the same rows of B: memory is asked for as many of them as one tile has in flight,
however many tiles there are. Tiles of few rows leave registers for more. The rank model has learned from no such
kernels, so they are not part of the space: the fastest of it are timed with and without (docs/decisions/0026).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lospmm import space
from lospmm.candidates import Candidates, ceil_divs
from lospmm.constraints import runs
from lospmm.estimate import work_of
from lospmm.model import Candidate, Problem, Schedule, TileSize

#: Elements of B in flight, beside those of the space.
PREFETCHES = (104, 144, 200)

#: Between the numbers of elements that are tried between two steps.
STEP = 4


def deepened(problem: Problem, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those of ``candidates`` that load more elements than they have in flight, with more, as long as that takes no
    more waves of blocks: the deepest first."""
    return _different(one for candidate in candidates for one in _deeper(problem, candidate, PREFETCHES))


def filled(problem: Problem, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those of ``candidates`` that have no room for the next step of the space, or of PREFETCHES, with as many more
    elements in flight as they have room for. Of tall tiles that step may leave a tenth of all registers."""
    found = []
    for candidate in candidates:
        own = candidate.schedule.prefetch
        step = next((one for one in (*space.PREFETCHES, *PREFETCHES) if one > own), None)
        if step is not None and not _deeper(problem, candidate, [step]):
            found += _deeper(problem, candidate, range(own + STEP, step, STEP))[:1]
    return _different(found)


def _deeper(problem: Problem, candidate: Candidate, prefetches: Iterable[int]) -> list[Candidate]:
    """``candidate`` with each of ``prefetches``, ascending, that is more than it has, as long as there are so many, and
    that takes no more waves of blocks; the deepest first."""
    most = int(candidate.tiling.nnc.max(initial=0)) // candidate.schedule.split_k
    schedules = [candidate.schedule]
    for prefetch in prefetches:
        if schedules[-1].prefetch < min(prefetch, most):
            schedules.append(replace(candidate.schedule, prefetch=prefetch))
    every = Candidates.of([replace(candidate, schedule=schedule) for schedule in schedules])
    work = work_of(problem, every)
    waves = ceil_divs(work.blocks, work.resident.clip(1)).tolist()
    fits = [*runs(problem, every)]
    return [every[at] for at in range(len(schedules) - 1, 0, -1) if fits[at] and waves[at] == waves[0]]


def _different(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Two that differ in nothing else may lead to the same."""
    found: dict[tuple[TileSize, Schedule], Candidate] = {}
    for one in candidates:
        found.setdefault((one.tile, one.schedule), one)
    return list(found.values())
