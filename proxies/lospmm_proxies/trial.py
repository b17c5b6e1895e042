"""A program that is built and timed for a candidate: a proxy of its kernel (``lospmm_proxies``)."""

from dataclasses import dataclass

from lospmm.codegen.ir import KernelProgram
from lospmm.problem.launch import Launch
from lospmm.space.candidates import UnrolledPlan


@dataclass(frozen=True, slots=True, eq=False)
class ProxyKernel:
    """A candidate's proxy; candidates may share one ``program``, built once and launched differently."""

    candidate: UnrolledPlan
    program: KernelProgram
    launch: Launch
