"""Proxies of unrolled candidates (section 5), and their compilation."""

import threading
from collections.abc import Sequence

from lospmm.codegen import emit
from lospmm.codegen.ir import KernelProgram
from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm_proxies import proxies
from lospmm_proxies.launch import kernel_launch, proxy_launch
from lospmm_proxies.trial import ProxyKernel


def proxies_of(problem: Problem, candidates: Sequence[UnrolledPlan], emitter: str) -> list[ProxyKernel]:
    """Return the proxies of ``candidates``, with their launches in the language of ``emitter``.

    A proxy in machine code has its kernel's registers, and so its occupancy; the shared memory of Equation 6 (section
    5.2) ranked short kernels worse (docs/results.md). Raises BadRequest if one does not fit.
    """
    return proxies(problem, candidates, kernel_launch if emitter == "sass" else proxy_launch)


def compile_proxy(
    problem: Problem, program: KernelProgram, emitter: str, store: Store, *, stop: threading.Event | None = None
) -> bytes:
    """Return the cubin of a proxy. Raises Unsupported, ToolchainFault, and CancelledError."""
    arch = problem.device.arch
    emission = emit(program, emitter, arch)
    return compile_kernel(emission, arch=arch, registers=program.registers, store=store, workers=1, cancel=stop).cubin
