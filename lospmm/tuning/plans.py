"""The plans of the families that read A as data, with their forecasts."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from lospmm.families import FAMILIES, ONE_COPY
from lospmm.families.candidate import Candidate
from lospmm.families.traits import traits_of
from lospmm.problem.problem import Problem
from lospmm.tuning.known import Known
from lospmm.tuning.options import DENSE
from lospmm_rank.predict.corrections import corrected, dense_micros, factor


def plans_for(problem: Problem, names: Collection[str], cache: str = "cold", memory: str = "fast") -> Known:
    """Return all plans of the families ``names``, the best forecast first; unrolled and dense, no rows, have none.

    Forecasts are corrected by measurements on such a device. ``cache`` and ``memory`` as in ``Options``.
    """
    traits, device = traits_of(problem, is_streamed=cache == "network"), problem.device
    of_dense = dense_micros(traits, device)
    of_dense *= factor(DENSE, of_dense, traits=traits, device=device)
    rows = ONE_COPY if memory == "low" else FAMILIES
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
        micros = corrected(name, plans, family.forecast(problem, plans), traits=traits, device=device)
        candidates += [Candidate(name, plan, float(one)) for plan, one in zip(plans, micros, strict=True)]
    in_order = tuple(sorted(candidates, key=lambda one: one.score))
    return Known(in_order, refusals, of_dense)  # no mapping proxy: it cannot be pickled


def plan_of(manifest: Mapping[str, Any], problem: Problem) -> Candidate | None:
    """Return the plan that a manifest names, of a kernel with A as data; None if this version does not make it."""
    plan, family = manifest["plan"], manifest["cubin_family"]
    rows = ONE_COPY if manifest["search"]["memory"] == "low" else FAMILIES
    listed = rows[family].plans(problem) if plan is not None and family in rows else ()
    return next((Candidate(family, one, 0.0) for one in listed if asdict(one) == plan["axes"]), None)
