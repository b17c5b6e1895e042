"""What is built and timed in a candidate's stead: the kernel itself, or a proxy of it (``lospmm_proxies``)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lospmm.ir import KernelProgram, launch
from lospmm.lower import lower
from lospmm.model import Candidate, Launch, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """Trials of several candidates may share one ``program``: it is built once and launched in several ways."""

    candidate: Candidate
    program: KernelProgram
    launch: Launch


#: A way to make trials; one trial per candidate, in the same order.
TrialMaker = Callable[[Problem, Sequence[Candidate]], list[Trial]]


def full(problem: Problem, candidates: Sequence[Candidate]) -> list[Trial]:
    """Every candidate as the very kernel that it would ship."""
    programs = [lower(problem, candidate) for candidate in candidates]
    return [Trial(c, program, launch(program)) for c, program in zip(candidates, programs, strict=True)]
