"""Products on tensor cores: by warpgroups, zeros included, where an sm_90 multiplies TF32 numbers (``warpgroups``), and
by warps that leave columns out, elsewhere and of 16 bits (``gathered_panels``)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lospmm.families import gathered_panels, warpgroups
from lospmm.families.gathered_panels import Plan as GatheredPanels
from lospmm.families.warpgroups import Warpgroups
from lospmm.model import Problem
from lospmm.packed import PackedKernel

Plan = GatheredPanels | Warpgroups


def refusal(problem: Problem) -> str | None:
    if problem.convolution is not None:
        return "a convolution"
    return gathered_panels.refusal(problem) if warpgroups.refusal(problem) else None


def plans(problem: Problem) -> Sequence[Plan]:
    """Of one kind: where both can be, warpgroups were the faster one (docs/decisions/0027)."""
    return gathered_panels.plans(problem) if warpgroups.refusal(problem) else warpgroups.plans(problem)


def forecast(problem: Problem, plans: Sequence[Plan]) -> NDArray[np.float64]:
    return np.array([_micros(problem, plan) for plan in plans])


def _micros(problem: Problem, plan: Plan) -> float:
    match plan:
        case GatheredPanels():
            return gathered_panels.micros(problem, plan)
        case Warpgroups():
            return warpgroups.micros(problem, plan)


def pack_plan(problem: Problem, plan: Plan) -> PackedKernel:
    match plan:
        case GatheredPanels():
            return gathered_panels.pack_plan(problem, plan)
        case Warpgroups():
            return warpgroups.pack_plan(problem, plan)
