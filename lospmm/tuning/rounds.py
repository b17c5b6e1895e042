"""What a search times next."""

from collections.abc import Callable, Sequence

import numpy as np

from lospmm.problem.problem import Problem
from lospmm.space.axes import walked_twice
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan, UnrolledPlans
from lospmm.space.explore import Space
from lospmm.stages import Stages
from lospmm.tuning.search import spread_over
from lospmm.tuning.surrogate import Pool, Surrogate
from lospmm.tuning.trial import Scored, Trial


class Rounds:
    """What is timed next."""

    def __init__(
        self,
        problem: Problem,
        pool: Callable[[], Pool],
        locksteps: Sequence[int],
        stages: Stages,
    ) -> None:
        """``pool`` has what may be timed."""
        self.problem, self.locksteps, self.stages, self._pool = problem, locksteps, stages, pool
        self.done = 0
        self._surrogate: Surrogate | None = None
        self._taken: set[int] = set()
        self._asked: set[tuple[TileSize, Schedule]] = set()

    def spread(self, shortlist: Sequence[Scored[UnrolledPlan]]) -> list[Scored[UnrolledPlan]]:
        found = spread_over(shortlist, self.locksteps)
        self._asked |= {_key(scored.candidate) for scored in found}
        return found

    def prepare(self) -> None:
        """Have all candidates ready to choose from."""
        with self.stages.part("rank"):
            pool = self._pool()
            self._surrogate = Surrogate(self.problem, pool)
        self._taken |= {at for key in self._asked if (at := pool.find(*key)) is not None}

    def next(
        self, ran: Sequence[Trial[UnrolledPlan]], pending: Sequence[Scored[UnrolledPlan]], count: int
    ) -> list[Scored[UnrolledPlan]]:
        """What promises most, after those that ran; those ``pending`` are taken to run as they are forecast."""
        assert self._surrogate is not None, "it is prepared"
        self.done += 1
        pool = self._surrogate.pool
        micros = {trial.candidate: trial.micros for trial in ran}
        waiting = [scored.candidate for scored in pending]
        with self.stages.part("rank"):
            chosen = self._surrogate.most_promising(micros, waiting, count, self._taken)
        self._taken |= set(chosen)
        return [Scored(pool[index], float(np.exp(pool.forecast[index]))) for index in chosen]


def _walked(problem: Problem, space: Space, count: int, fastest: UnrolledPlan) -> list[Scored[UnrolledPlan]]:
    """Those that walk their code twice: machine code does, where it has clusters too."""
    if not count or max(space.splits) == 1:
        return []
    found = walked_twice(problem, UnrolledPlans.of(space.survivors), fastest)
    return [Scored(candidate, micros) for candidate, micros in found[:count]]


def _key(candidate: UnrolledPlan) -> tuple[TileSize, Schedule]:
    return candidate.tile, candidate.schedule
