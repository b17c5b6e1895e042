"""The plans of the families that read A as data, with their forecasts."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.families import FAMILIES, ONE_COPY
from lospmm.families.candidate import Candidate
from lospmm.families.traits import traits_of
from lospmm.problem.problem import Problem
from lospmm.tuning.known import Known
from lospmm.tuning.options import DENSE
from lospmm_rank.predict.corrections import corrected, dense_micros, factor

#: Corrects the forecasts, (plans,), of a family's plans.
Correct = Callable[[str, Sequence[Any], NDArray[np.float64]], NDArray[np.float64]]


def plans_for(problem: Problem, names: Sequence[str], cache: str = "cold", memory: str = "fast") -> Known:
    """Return the plans of these families, with forecasts corrected by measurements on such a device.

    ``cache`` and ``memory`` as in ``Options``; ``names`` as in ``family_plans``.
    """
    traits, device = traits_of(problem, is_streamed=cache == "network"), problem.device
    micros = dense_micros(traits, device)
    micros *= factor(DENSE, micros, traits=traits, device=device)
    correct = partial(corrected, traits=traits, device=device)
    return family_plans(problem, names, correct, dense_micros=micros, is_one_copy=memory == "low")


def family_plans(
    problem: Problem,
    names: Collection[str],
    correct: Correct = lambda _family, _plans, micros: micros,
    *,
    dense_micros: float | None = None,
    is_one_copy: bool = False,
) -> Known:
    """Return all plans of the families ``names``, the best forecast first; unrolled and dense, no rows, have none.

    With ``is_one_copy``, only plans that read A alike at every N.
    """
    rows = ONE_COPY if is_one_copy else FAMILIES
    candidates: list[Candidate] = []
    refusals: dict[str, str] = {}
    for name in names:
        if (family := rows.get(name)) is None:
            continue
        why = "no convolutions" if problem.convolution is not None else family.refusal(problem)
        plans = family.plans(problem) if why is None else ()
        if not plans:
            refusals[name] = why or "no plan fits"
            continue
        micros = correct(name, plans, family.forecast(problem, plans))
        candidates += [Candidate(name, plan, float(one)) for plan, one in zip(plans, micros, strict=True)]
    in_order = tuple(sorted(candidates, key=lambda one: one.score))
    return Known(in_order, refusals, dense_micros)  # no mapping proxy: it cannot be pickled
