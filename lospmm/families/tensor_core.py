"""Products on the tensor cores of sm_90: TF32 and float32 by ``warpgroups``, 16-bit types by ``two_of_four``.

``warpgroups`` multiplies zeros too; ``two_of_four`` skips two of every four columns.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lospmm.families import two_of_four, warpgroups
from lospmm.families.all_fours import Shared
from lospmm.families.packed import PackedKernel
from lospmm.families.two_of_four import TwoOfFour
from lospmm.families.warpgroups import Warpgroups
from lospmm.problem.problem import Problem

Plan = Warpgroups | TwoOfFour


def refusal(problem: Problem) -> str | None:
    """Return why this family has no kernel for the problem, or None."""
    return two_of_four.refusal(problem) if problem.dtype.is_16_bit else warpgroups.refusal(problem)


def plans(problem: Problem) -> Sequence[Plan]:
    """Return the plans of the problem's type."""
    return two_of_four.plans(problem) if problem.dtype.is_16_bit else warpgroups.plans(problem)


def forecast(problem: Problem, plans: Sequence[Plan]) -> NDArray[np.float64]:
    """Predict the microseconds of each plan, (plans,)."""
    return np.array(
        [
            two_of_four.micros(problem, plan) if isinstance(plan, TwoOfFour) else warpgroups.micros(problem, plan)
            for plan in plans
        ]
    )


def shared(problem: Problem, plan: Plan) -> Shared | None:
    """Return the packing steps that processes can share, or None."""
    return two_of_four.shared(problem, plan) if isinstance(plan, TwoOfFour) else None


def pack_plan(problem: Problem, plan: Plan) -> PackedKernel:
    """Return the kernel of a plan."""
    if isinstance(plan, TwoOfFour):
        return two_of_four.pack_plan(problem, plan)
    return warpgroups.pack_plan(problem, plan)
