"""Products on tensor cores. On an sm_90 by warpgroups: zeros included, of TF32 numbers and of float32 (``warpgroups``),
and two of every four columns, of 16 bits (``two_of_four``). By warps that leave columns out, elsewhere and of 16 bits
(``gathered_panels``)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lospmm.families import gathered_panels, two_of_four, warpgroups
from lospmm.families.all_fours import Shared
from lospmm.families.gathered_panels import GatheredPanelsPlan as GatheredPanels
from lospmm.families.packed import PackedKernel
from lospmm.families.two_of_four import TwoOfFour
from lospmm.families.warpgroups import Warpgroups
from lospmm.problem.problem import Problem

Plan = GatheredPanels | Warpgroups | TwoOfFour


def refusal(problem: Problem) -> str | None:
    if problem.convolution is not None:
        return "a convolution"
    return gathered_panels.refusal(problem) if warpgroups.refusal(problem) else None


def plans(problem: Problem) -> Sequence[Plan]:
    """Of one kind: where warpgroups can be, they were the faster one (docs/decisions/0027, 0033)."""
    if warpgroups.refusal(problem) is None:
        return warpgroups.plans(problem)
    if two_of_four.refusal(problem) is None:
        return two_of_four.plans(problem)
    return gathered_panels.plans(problem)


def forecast(problem: Problem, plans: Sequence[Plan]) -> NDArray[np.float64]:
    return np.array([_micros(problem, plan) for plan in plans])


def _micros(problem: Problem, plan: Plan) -> float:
    match plan:
        case GatheredPanels():
            return gathered_panels.micros(problem, plan)
        case Warpgroups():
            return warpgroups.micros(problem, plan)
        case TwoOfFour():
            return two_of_four.micros(problem, plan)


def shared(problem: Problem, plan: Plan) -> Shared | None:
    return two_of_four.shared(problem, plan) if isinstance(plan, TwoOfFour) else None


def pack_plan(problem: Problem, plan: Plan) -> PackedKernel:
    match plan:
        case GatheredPanels():
            return gathered_panels.pack_plan(problem, plan)
        case Warpgroups():
            return warpgroups.pack_plan(problem, plan)
        case TwoOfFour():
            return two_of_four.pack_plan(problem, plan)
