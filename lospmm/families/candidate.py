"""What a tuning builds and times: a plan of a family, the unrolled one or one of ``families.FAMILIES``."""

import math
from dataclasses import dataclass, field
from typing import Any

from lospmm.space.candidates import UnrolledPlan

#: The family with A in its instructions.
UNROLLED = "unrolled"

#: Families that read A as data, in the order in which reports list them; ``families.FAMILIES`` has a row for each.
TEMPLATE_FAMILIES = ("csr", "group_coo", "block_group_coo", "hyb", "spmv", "bitmap", "tensor_core")

#: Those with kernels that read A alike at every N (``families.ONE_COPY``), and those with values of 8 bits.
ONE_COPY_FAMILIES, CODED_FAMILIES = ("bitmap",), ("spmv", "bitmap")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan of a family, which a tuning may build and time.

    ``plan`` is a ``space.candidates.UnrolledPlan`` of the unrolled family, or one of ``Family.plans``. ``score`` orders
    the candidates of a family, the lowest first: microseconds by forecast, or what a rank model says.
    """

    family: str
    plan: Any
    score: float = field(compare=False)

    @property
    def is_unrolled(self) -> bool:
        """Whether A is in the instructions of its kernel."""
        return self.family == UNROLLED


def unrolled(plan: UnrolledPlan, score: float = math.nan) -> Candidate:
    """Return the candidate of an unrolled plan."""
    return Candidate(UNROLLED, plan, score)
