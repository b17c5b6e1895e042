"""The search, from a problem to the candidate that is built: the one place that knows the order of the steps.

space -> constraints -> schedules -> ranker -> shortlist -> trials -> choice

Without a GPU the choice is the ranker's first. With one the shortlist is timed, and then the neighbours of the fastest,
and of the next fastest, as long as that finds something faster.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lospmm.errors import GpuFault, NothingFits
from lospmm.gpu.messages import Measurement
from lospmm.model import Candidate, Problem, Schedule, TileSize, Tiling
from lospmm.ranker import Ranker, shortlist
from lospmm.reorder import regroup
from lospmm.space import Space, explore, neighbours, widen
from lospmm.stages import Stages

#: How often neighbours of a candidate are timed at most, how many of them each time, and how often in a row in vain:
#: times of one kernel differ by several percent, so that the fastest is not always the one to go on from.
ROUNDS = 8
NEIGHBOURS = 12
PATIENCE = 3


@dataclass(frozen=True, slots=True)
class Scored:
    candidate: Candidate
    score: float  # the ranker's: the lowest is best


@dataclass(frozen=True, slots=True)
class Trialled:
    """A candidate that was timed, or that failed."""

    candidate: Candidate
    score: float
    measurement: Measurement

    @property
    def micros(self) -> float:
        """Infinite for one that failed."""
        return float("inf") if self.measurement.timing is None else self.measurement.timing.micros


@dataclass(frozen=True, slots=True)
class Choice:
    """The winner and everything that led to it."""

    winner: Candidate
    space: Space
    shortlist: tuple[Scored, ...]  # best first
    trials: tuple[Trialled, ...] = ()  # in the order in which they were timed


#: Builds and times candidates, in their order; fewer than it was given where time is up.
Trials = Callable[[Sequence[Candidate]], Iterable[Measurement]]


def search(
    problem: Problem,
    ranker: Ranker,
    shortlist_size: int,
    stages: Stages,
    *,
    workers: int = 1,
    lockstep: int = 0,
    splits: tuple[int, ...] = (1,),
) -> Choice:
    """Choose without measuring: the candidate that ``ranker`` puts first. Raises NothingFits."""
    space = explore_problem(problem, stages, workers=workers, splits=splits)
    if not space.survivors:
        raise NothingFits(_refusals(problem, space))
    with stages.stage("constraints"):
        candidates = widen(problem, space, lockstep)
    with stages.stage("rank"):
        scores = ranker(problem, candidates)
        # As many tiles of as many columns differ little in time, whatever the rows of a tile.
        tiles = candidates.by_tiling(lambda tiling: len(tiling.tiles))
        kinds = np.stack((tiles, candidates.cols, candidates.split_k), axis=1)
        chosen = shortlist(scores, shortlist_size, kinds, candidates.split_k)
        best = [Scored(candidates[at], float(scores[at])) for at in chosen]
    return Choice(best[0].candidate, space, tuple(best))


def choose_by_time(
    problem: Problem,
    choice: Choice,
    ranker: Ranker,
    trials: Trials,
    *,
    locksteps: Sequence[int] = (0,),
    budget_seconds: float | None = None,
) -> Choice:
    """``choice`` with the fastest of its shortlist, and of the neighbours of what was fast, as its winner.

    Each round goes on from the fastest candidate that none has gone on from. The last one is over when PATIENCE rounds
    in a row have found nothing faster, after ROUNDS, or once ``budget_seconds`` have passed; one candidate is always
    timed. Raises GpuFault where none of them ran.
    """
    deadline = None if budget_seconds is None else time.monotonic() + budget_seconds
    timed: list[Trialled] = []
    batch = list(choice.shortlist)
    fastest: Trialled | None = None
    left: set[tuple[TileSize, Schedule]] = set()
    vain = 0
    for _ in range(ROUNDS + 1):
        timed += _timed(batch, trials, deadline, first=not timed)
        ran = sorted((trial for trial in timed if trial.measurement.timing is not None), key=lambda trial: trial.micros)
        if not ran:
            raise GpuFault(f"none of {len(timed)} kernels ran: {timed[0].measurement.failure}")
        vain = vain + 1 if ran[0] is fastest else 0
        fastest = ran[0]
        start = next((trial for trial in ran if _key(trial.candidate) not in left), None)
        if start is None or vain == PATIENCE or (deadline is not None and time.monotonic() >= deadline):
            break
        left.add(_key(start.candidate))
        batch = _unseen(problem, choice.space, ranker, timed, start.candidate, locksteps)
    assert fastest is not None
    return replace(choice, winner=fastest.candidate, trials=tuple(timed))


def _timed(batch: Sequence[Scored], trials: Trials, deadline: float | None, *, first: bool) -> Iterator[Trialled]:
    measurements = trials([scored.candidate for scored in batch])
    for scored, measurement in zip(batch, measurements, strict=False):
        yield Trialled(scored.candidate, scored.score, measurement)
        first = first and measurement.timing is None
        if deadline is not None and time.monotonic() >= deadline and not first:
            return


def _unseen(
    problem: Problem,
    space: Space,
    ranker: Ranker,
    timed: Sequence[Trialled],
    candidate: Candidate,
    locksteps: Sequence[int],
) -> list[Scored]:
    """The neighbours of ``candidate`` that were not timed yet, the ranker's best first."""
    seen = {_key(trial.candidate) for trial in timed}
    near = [c for c in neighbours(problem, space, candidate, locksteps) if _key(c) not in seen]
    if not near:
        return []
    scores = ranker(problem, near)
    return [Scored(near[index], float(scores[index])) for index in shortlist(scores, NEIGHBOURS)]


def _key(candidate: Candidate) -> tuple[TileSize, Schedule]:
    return candidate.tile, candidate.schedule


def explore_problem(problem: Problem, stages: Stages, *, workers: int = 1, splits: tuple[int, ...] = (1,)) -> Space:
    """The space and its constraints, with rows regrouped by Algorithm 1."""

    def timed_regroup(size_limits: Sequence[int]) -> dict[int, Tiling]:
        with stages.stage("reorder"):
            return regroup(problem.matrix, size_limits, workers=workers)

    with stages.stage("constraints"):
        return explore(problem, timed_regroup, splits=splits)


def _refusals(problem: Problem, space: Space) -> str:
    counts = Counter(verdict.constraint for verdict in space.verdicts)
    refused = ", ".join(f"{count} by {name}" for name, count in counts.items())
    return f"no tile size fits {problem.device.name}: of {space.size}, {refused}"
