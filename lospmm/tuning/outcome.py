"""The outcome of a finished tuning."""

import io
from dataclasses import dataclass

import numpy as np

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

    @property
    def bias(self) -> bytes | None:
        """The bias, (m,), as a .npy file; None without one."""
        if self.problem.epilogue.bias is None:
            return None
        content = io.BytesIO()
        bias = np.array(self.problem.epilogue.bias, dtype="<f4")
        np.lib.format.write_array(content, bias, version=(1, 0), allow_pickle=False)
        return content.getvalue()
