"""The interface of rankers (section 3.5), and the choice of the best-ranked candidates."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan


class Ranker(Protocol):
    """Predicts the order of one problem's candidates: the analytic estimate, or a trained model."""

    def __call__(self, problem: Problem, candidates: Sequence[UnrolledPlan]) -> NDArray[np.float64]:
        """Return a score of each candidate, (candidates,): the lowest is predicted fastest."""


def shortlist(
    scores: NDArray[np.float64],
    size: int,
    kinds: NDArray[np.integer] | None = None,
    groups: NDArray[np.integer] | None = None,
) -> list[int]:
    """Return the indices of the ``size`` lowest scores, best first; ties keep their order.

    ``scores`` is (candidates,). Of candidates of one kind (equal rows of ``kinds``, (candidates, axes)) only the best
    is taken, unless there are fewer kinds than ``size``. The best of each group (``groups``, (candidates,)) is taken
    too, as far as ``size`` allows: scores may be biased by group.
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
