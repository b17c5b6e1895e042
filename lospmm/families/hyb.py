"""hyb (SparseTIR, section 4.1): A decomposed into column partitions, or into buckets of rows of about the same length.

With one partition B is read from where it lies, and rows are padded to the width of their bucket (``buckets``); with
several, or one that shared memory holds, the rows of B that a partition takes are copied there (``partitions``). Which,
how many and how wide is this family's space.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lospmm.families import buckets, partitions
from lospmm.families.buckets import Buckets
from lospmm.families.partitions import Partitions
from lospmm.model import Problem
from lospmm.packed import PackedKernel

Plan = Buckets | Partitions


def refusal(problem: Problem) -> str | None:
    return "a convolution" if problem.convolution is not None else None


def plans(problem: Problem) -> list[Plan]:
    return [*buckets.plans(problem), *partitions.plans(problem)]


def forecast(problem: Problem, plans: Sequence[Plan]) -> NDArray[np.float64]:
    found = np.empty(len(plans))
    for at, plan in enumerate(plans):
        if isinstance(plan, Buckets):
            found[at] = buckets.forecast(problem, [plan])[0]
        else:
            found[at] = partitions.forecast(problem, [plan])[0]
    return found


def pack_plan(problem: Problem, plan: Plan) -> PackedKernel:
    return buckets.pack_plan(problem, plan) if isinstance(plan, Buckets) else partitions.pack_plan(problem, plan)
