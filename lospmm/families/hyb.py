"""hyb (SparseTIR, section 4.1): A in column partitions, or in buckets of rows of similar length.

With one partition B is read in place, and rows are padded to the width of their bucket (``buckets``); dense blocks,
if any, are parts beside the buckets (``strips``). With several partitions, or one that shared memory holds, a
partition's rows of B are copied there (``partitions``). Which of these, how many and how wide is this family's space.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lospmm.families import buckets, partitions, strips
from lospmm.families.buckets import Buckets
from lospmm.families.packed import PackedKernel
from lospmm.families.partitions import Partitions
from lospmm.families.strips import Strips
from lospmm.problem.problem import Problem

Plan = Buckets | Partitions | Strips


def refusal(problem: Problem) -> str | None:
    """Return why this family has no kernel for the problem, or None."""
    return "a convolution" if problem.convolution is not None else None


def plans(problem: Problem) -> list[Plan]:
    """Return the plans of buckets, strips and partitions."""
    return [*buckets.plans(problem), *strips.plans(problem), *partitions.plans(problem)]


def forecast(problem: Problem, plans: Sequence[Plan]) -> NDArray[np.float64]:
    """Predict the microseconds of each plan, (plans,)."""
    return np.array([_micros(problem, plan) for plan in plans])


def _micros(problem: Problem, plan: Plan) -> float:
    match plan:
        case Buckets():
            found = buckets.forecast(problem, [plan])
        case Strips():
            found = strips.forecast(problem, [plan])
        case Partitions():
            found = partitions.forecast(problem, [plan])
    return float(found[0])


def pack_plan(problem: Problem, plan: Plan) -> PackedKernel:
    """Return the kernel of a plan."""
    match plan:
        case Buckets():
            return buckets.pack_plan(problem, plan)
        case Strips():
            return strips.pack_plan(problem, plan)
        case Partitions():
            return partitions.pack_plan(problem, plan)
