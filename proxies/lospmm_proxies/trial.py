"""What is built and timed in a candidate's stead: the kernel itself, or a proxy of it (``lospmm_proxies``)."""

from dataclasses import dataclass

from lospmm.codegen.ir import KernelProgram
from lospmm.problem.problem import Launch
from lospmm.space.candidates import UnrolledPlan


@dataclass(frozen=True, slots=True, eq=False)
class ProxyKernel:
    """Trials of several candidates may share one ``program``: it is built once and launched in several ways."""

    candidate: UnrolledPlan
    program: KernelProgram
    launch: Launch
