"""Who orders the survivors: the analytic estimate, or a learned model joined at the top (section 3.5)."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lospmm.model import Candidate, Problem


class Ranker(Protocol):
    """Scores candidates of one problem; the lowest score is expected to be the fastest kernel."""

    def __call__(self, problem: Problem, candidates: Sequence[Candidate]) -> NDArray[np.float64]: ...


def shortlist(scores: NDArray[np.float64], size: int) -> NDArray[np.intp]:
    """Indices of the ``size`` lowest scores, best first; equal scores in the order of the candidates."""
    return np.argsort(scores, kind="stable")[:size]
