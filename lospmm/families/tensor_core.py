"""Family of products on tensor cores; which kind depends on GPU and type.

On sm_90, warpgroups multiply TF32 and float32 with zeros included (``warpgroups``), and 16-bit types with two of
every four columns (``two_of_four``). Elsewhere, and for few columns of 16 bits, warps skip columns
(``gathered_panels``).
"""

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
    """Return why this family has no kernel for the problem, or None."""
    if problem.convolution is not None:
        return "a convolution"
    return gathered_panels.refusal(problem) if warpgroups.refusal(problem) else None


def plans(problem: Problem) -> Sequence[Plan]:
    """Return plans of one kind: warpgroups if possible, which measured faster (docs/decisions/0027, 0033)."""
    if warpgroups.refusal(problem) is None:
        return warpgroups.plans(problem)
    if two_of_four.refusal(problem) is None:
        return two_of_four.plans(problem)
    return gathered_panels.plans(problem)


def forecast(problem: Problem, plans: Sequence[Plan]) -> NDArray[np.float64]:
    """Predict the microseconds of each plan, (plans,)."""
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
    """Return the packing steps that processes can share, or None."""
    return two_of_four.shared(problem, plan) if isinstance(plan, TwoOfFour) else None


def pack_plan(problem: Problem, plan: Plan) -> PackedKernel:
    """Return the kernel of a plan."""
    match plan:
        case GatheredPanels():
            return gathered_panels.pack_plan(problem, plan)
        case Warpgroups():
            return warpgroups.pack_plan(problem, plan)
        case TwoOfFour():
            return two_of_four.pack_plan(problem, plan)
