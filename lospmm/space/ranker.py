"""Who orders the survivors: the analytic estimate, or a learned model joined at the top (section 3.5)."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan


class Ranker(Protocol):
    """Scores candidates of one problem; the lowest score is expected to be the fastest kernel."""

    def __call__(self, problem: Problem, candidates: Sequence[UnrolledPlan]) -> NDArray[np.float64]: ...


def shortlist(
    scores: NDArray[np.float64],
    size: int,
    kinds: NDArray[np.integer] | None = None,
    groups: NDArray[np.integer] | None = None,
) -> list[int]:
    """Indices of the ``size`` lowest scores, best first; equal scores in the order of the candidates.

    Of candidates of one kind (equal rows of ``kinds``) only the best is taken, unless there are fewer kinds than
    ``size``. Of every one of ``groups`` the best is taken, as far as ``size`` allows: scores may be off by group.
    """
    order: list[int] = np.argsort(scores, kind="stable").tolist()
    chosen = order[:size] if kinds is None else _of_different_kinds(order, size, kinds)
    if groups is None:
        return chosen
    _, first = np.unique(groups[order], return_index=True)
    leaders = sorted(first.tolist())  # places in the order
    others = [index for index in chosen if index not in {order[place] for place in leaders}]
    taken = {*(order[place] for place in leaders[:size]), *others[: max(size - len(leaders), 0)]}
    return [index for index in order if index in taken]


def _of_different_kinds(order: list[int], size: int, kinds: NDArray[np.integer]) -> list[int]:
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
