"""Kernel families that read A as data.

The unrolled kernel has A in its instructions, and its space is searched (``lospmm.tuning.unrolled``). A family of the
table ``FAMILIES`` reads A as data, with a template (``lospmm.families.packed``), and has few enough plans to list them
all. To add a family, add its module, a row, and its name (``candidate.TEMPLATE_FAMILIES``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.families import bitmap, block_group_coo, group_coo, rows, spmv, tensor_core
from lospmm.families.all_fours import Shared
from lospmm.families.candidate import ONE_COPY_FAMILIES, TEMPLATE_FAMILIES, Candidate
from lospmm.families.packed import PackedKernel
from lospmm.problem.problem import Problem


@dataclass(frozen=True, slots=True)
class Family:
    """A row of ``FAMILIES``: the functions of a family.

    refusal   returns why there is no kernel for a product (no family has convolutions), in a few words, or None
    plans     returns the plans to try: frozen dataclasses whose fields are the axes of the space; all can be built
    forecast  returns the predicted microseconds of each plan, (plans,); their order is what matters
    pack      returns the kernel of a plan; raises Unsupported for limits that ``plans`` could not know
    shared    returns the slow packing step that a plan shares with others, or None: processes run it together before
              ``pack``, which finds its result
    """

    refusal: Callable[[Problem], str | None]
    plans: Callable[[Problem], Sequence[Any]]
    forecast: Callable[[Problem, Sequence[Any]], NDArray[np.float64]]
    pack: Callable[[Problem, Any], PackedKernel]
    shared: Callable[[Problem, Any], Shared | None] = lambda _problem, _plan: None


def _takes_all(_problem: Problem) -> None:
    """Refuse nothing."""


_ROWS = (
    Family(_takes_all, rows.csr_plans, rows.forecast, rows.pack_plan),
    Family(group_coo.refusal, group_coo.plans, group_coo.forecast, group_coo.pack_plan),
    Family(block_group_coo.refusal, block_group_coo.plans, block_group_coo.forecast, block_group_coo.pack_plan),
    Family(_takes_all, rows.hyb_plans, rows.forecast, rows.pack_plan),
    Family(spmv.refusal, spmv.plans, spmv.forecast, spmv.pack_plan),
    Family(bitmap.refusal, bitmap.plans, bitmap.forecast, bitmap.pack_plan),
    Family(tensor_core.refusal, tensor_core.plans, tensor_core.forecast, tensor_core.pack_plan, tensor_core.shared),
)

#: The families by name.
FAMILIES: Mapping[str, Family] = MappingProxyType(dict(zip(TEMPLATE_FAMILIES, _ROWS, strict=True)))

_ONE_COPY_ROWS = (Family(bitmap.one_copy_refusal, bitmap.one_copy_plans, bitmap.forecast, bitmap.pack_plan),)

#: Families restricted to plans that read one layout of A for every N, so that the kernels of a layer share one copy.
ONE_COPY: Mapping[str, Family] = MappingProxyType(dict(zip(ONE_COPY_FAMILIES, _ONE_COPY_ROWS, strict=True)))


def shared_of(problem: Problem, candidate: Candidate) -> Shared | None:
    """Return the packing step that a candidate's plan shares with others; None: there is none."""
    return None if candidate.is_unrolled else FAMILIES[candidate.family].shared(problem, candidate.plan)
