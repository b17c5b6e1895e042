"""Who orders the survivors: the analytic estimate, or a learned model joined at the top (section 3.5)."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lospmm.model import Candidate, Problem


class Ranker(Protocol):
    """Scores candidates of one problem; the lowest score is expected to be the fastest kernel."""

    def __call__(self, problem: Problem, candidates: Sequence[Candidate]) -> NDArray[np.float64]: ...


def shortlist(scores: NDArray[np.float64], size: int, kinds: NDArray[np.integer] | None = None) -> list[int]:
    """Indices of the ``size`` lowest scores, best first; equal scores in the order of the candidates.

    Of candidates of one kind (equal rows of ``kinds``) only the best is taken, unless there are fewer kinds than
    ``size``.
    """
    order: list[int] = np.argsort(scores, kind="stable").tolist()
    if kinds is None:
        return order[:size]
    best: list[int] = []
    rest: list[int] = []
    seen: set[bytes] = set()
    for index in order:
        kind = kinds[index].tobytes()
        (rest if kind in seen else best).append(index)
        seen.add(kind)
        if len(best) == size:
            break
    return (best + rest)[:size]
