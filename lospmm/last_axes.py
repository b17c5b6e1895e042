"""Candidates that differ from the fastest of a search in axes that its space does not have.

These are several tiles to a block (``chains``), more loads in flight (``deeper``), rows that are stored early
(``early``). Neither the estimate nor the rank model tells such candidates from the others, so they are timed beside
those that they are made of, at the end of the rounds. So are some that walk their code twice, of tile sizes of their
own (``twice``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lospmm.chains import chained
from lospmm.deeper import deepened, filled
from lospmm.early import stored_early
from lospmm.model import Candidate, Problem


@dataclass(frozen=True, slots=True)
class LastAxes:
    """How many candidates at most differ from the fastest in which axis."""

    chained: int = 4
    deeper: int = 1
    filled: int = 1
    early: int = 3
    walked: int = 4


LAST_AXES = LastAxes()
NO_LAST_AXES = LastAxes(0, 0, 0, 0, 0)


def varied(problem: Problem, fastest: Sequence[Candidate], counts: LastAxes) -> list[Candidate]:
    """What is made of the ``fastest``, the fastest first. Rows are also stored early by the first with several tiles to
    a block and by the first with more loads in flight: what each of two axes gains may add up."""
    chains = chained(problem, fastest)[: counts.chained]
    deeper = deepened(problem, fastest)[: counts.deeper]
    full = filled(problem, fastest)[: counts.filled]
    early = stored_early(problem, [*fastest[:1], *chains[:1], *(deeper or full)[:1], *fastest[1:]])[: counts.early]
    return [*chains, *deeper, *full, *early]
