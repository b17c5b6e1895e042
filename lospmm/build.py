"""From a candidate to a kernel that a GPU loads: lower, emit, compile."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from lospmm.codegen import emit
from lospmm.codegen.emission import Emission
from lospmm.codegen.sass.scheduler import reserved_registers
from lospmm.ir import KernelProgram, launch
from lospmm.lower import lower
from lospmm.model import Candidate, Launch, Problem
from lospmm.store import Store
from lospmm.toolchain.compile import Binary, compile_kernel


@dataclass(frozen=True, slots=True)
class Build:
    program: KernelProgram
    emission: Emission
    binary: Binary

    @property
    def launch(self) -> Launch:
        return launch(self.program)


def build(
    problem: Problem,
    candidate: Candidate,
    emitter: str,
    *,
    store: Store,
    workers: int,
    progress: Callable[[int, int], None] | None = None,
    cancel: threading.Event | None = None,
) -> Build:
    """The kernel of ``candidate``, compiled. Raises Unsupported, ToolchainFault, and CancelledError."""
    program = lower(problem, candidate)
    emission = emit(program, emitter, problem.device.arch)
    return Build(program, emission, compile_emission(problem, program, emission, store, workers, progress, cancel))


def compile_emission(
    problem: Problem,
    program: KernelProgram,
    emission: Emission,
    store: Store,
    workers: int,
    progress: Callable[[int, int], None] | None = None,
    cancel: threading.Event | None = None,
) -> Binary:
    return compile_kernel(
        emission,
        arch=problem.device.arch,
        registers=program.registers,
        store=store,
        workers=workers,
        progress=progress,
        cancel=cancel,
    )


def for_emitter(problem: Problem, emitter: str) -> Problem:
    """``problem`` with what a thread needs beside its accumulators and buffers: a compiler needs more than we do."""
    if emitter != "sass":
        return problem
    rows = max(problem.matrix.m, problem.matrix.k)
    return replace(problem, device=replace(problem.device, reserved_registers=reserved_registers(rows, problem.n)))
