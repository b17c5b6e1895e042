"""Kernel families beside the unrolled one. To add a family, add its module and a row to ``FAMILIES``.

The unrolled kernel has A in its instructions and a search of its own (``lospmm.tuning.search``). A family of this table
has A as data that a template reads (``lospmm.families.packed``), and few enough plans to name them all:

    refusal   why it has no kernel for a problem, in a few words, or None
    plans     what it would try: frozen values, whose fields are the axes of its space; every one of them can be built
    forecast  microseconds of each plan, (plans,), by counting what limits it; the order is what matters
    shared    what of packing a plan takes long and others need too, which all processes that do may do together, before
              ``pack``, which finds it; None: nothing
    pack      the kernel of a plan

Raises are those of ``Unsupported`` alone, from ``pack``, for what ``plans`` could not know.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.families import bitmap, block_group_coo, csr, group_coo, hyb, tensor_core
from lospmm.families.all_fours import Shared
from lospmm.families.packed import PackedKernel
from lospmm.problem.problem import Problem


@dataclass(frozen=True, slots=True)
class Family:
    refusal: Callable[[Problem], str | None]
    plans: Callable[[Problem], Sequence[Any]]
    forecast: Callable[[Problem, Sequence[Any]], NDArray[np.float64]]
    pack: Callable[[Problem, Any], PackedKernel]
    shared: Callable[[Problem, Any], Shared | None] = lambda _problem, _plan: None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan of a family, with its forecast: what a candidate is to the unrolled family."""

    family: str
    plan: Any
    forecast_micros: float


#: By name, in the order in which reports list them.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "csr": Family(csr.refusal, csr.plans, csr.forecast, csr.pack_plan),
        "group_coo": Family(group_coo.refusal, group_coo.plans, group_coo.forecast, group_coo.pack_plan),
        "block_group_coo": Family(
            block_group_coo.refusal, block_group_coo.plans, block_group_coo.forecast, block_group_coo.pack_plan
        ),
        "hyb": Family(hyb.refusal, hyb.plans, hyb.forecast, hyb.pack_plan),
        "bitmap": Family(bitmap.refusal, bitmap.plans, bitmap.forecast, bitmap.pack_plan),
        "tensor_core": Family(
            tensor_core.refusal,
            tensor_core.plans,
            tensor_core.forecast,
            tensor_core.pack_plan,
            tensor_core.shared,
        ),
    }
)


def shared_of(problem: Problem, entrant: Candidate) -> Shared | None:
    """What an entrant's plan shares with others."""
    return FAMILIES[entrant.family].shared(problem, entrant.plan)
