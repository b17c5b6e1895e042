"""The outcome of a finished tuning."""

from dataclasses import dataclass

from lospmm.artifact.manifest import Measured, Verified
from lospmm.families.candidate import Candidate
from lospmm.matrix.readers import Values
from lospmm.problem.lanes import in_lanes
from lospmm.problem.problem import Problem
from lospmm.tuning.build import Build, for_emitter
from lospmm.tuning.dense import DenseChoice
from lospmm.tuning.known import Known
from lospmm.tuning.options import Options


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished tuning: the problem and options, what is known of the candidates, and the winner."""

    problem: Problem
    options: Options  # resolved
    values: Values
    seed: int | None  # of random values
    known: Known
    winner: Candidate
    build: Build
    verified: Verified | None
    measured: Measured | None
    dense: DenseChoice | None = None  # None: the family "dense" took no part
    forecast_micros: float | None = None  # by which the winner was chosen, where nothing was timed

    @property
    def searched_problem(self) -> Problem:
        """The problem that unrolled kernels are searched for: in words, with the emitter's registers."""
        return in_lanes(for_emitter(self.problem, self.options.emitter))
