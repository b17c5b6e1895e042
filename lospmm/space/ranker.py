"""The interface of rankers (section 3.5), and the choice of the best-ranked candidates."""

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan

#: Returns a score of each of a problem's candidates, (candidates,): the lowest is predicted fastest. The analytic
#: estimate, or a trained model.
Ranker = Callable[[Problem, Sequence[UnrolledPlan]], NDArray[np.float64]]


def shortlist(
    scores: NDArray[np.float64],
    size: int,
    kinds: Sequence[NDArray[np.integer]] = (),
    groups: NDArray[np.integer] | None = None,
) -> list[int]:
    """Return the indices of the ``size`` lowest scores, best first; ties keep their order.

    ``scores`` is (candidates,). Only the best of each kind (equal rows of ``kinds[0]``, (candidates, axes)) is taken;
    if there are fewer kinds than ``size``, the best of each kind by ``kinds[1]`` come next, and at last any. The best
    of each group (``groups``, (candidates,)) is taken too, as far as ``size`` allows: scores may be biased by group.
    """
    order: list[int] = np.argsort(scores, kind="stable").tolist()
    chosen = _distinct(order, size, kinds)
    if groups is None:
        return chosen
    _, first = np.unique(groups[order], return_index=True)
    leaders = sorted(first.tolist())  # places in the order
    others = [index for index in chosen if index not in {order[place] for place in leaders}]
    taken = {*(order[place] for place in leaders[:size]), *others[: max(size - len(leaders), 0)]}
    return [index for index in order if index in taken]


def _distinct(order: Sequence[int], size: int, kinds: Sequence[NDArray[np.integer]]) -> list[int]:
    chosen: dict[int, None] = {}
    for axes in kinds:
        seen = {axes[index].tobytes() for index in chosen}
        for index in order if len(chosen) < size else ():
            if (kind := axes[index].tobytes()) not in seen:
                seen.add(kind)
                chosen[index] = None
                if len(chosen) == size:
                    break
    others = (index for index in order if index not in chosen)
    return [*chosen, *islice(others, size - len(chosen))]
