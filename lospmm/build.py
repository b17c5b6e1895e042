"""From a candidate to a kernel that a GPU loads: lower, emit, compile."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from lospmm.codegen import emit, source_of
from lospmm.codegen.emission import Emission
from lospmm.codegen.sass.reserve import layer_registers, reserved_registers
from lospmm.dtype import Dtype
from lospmm.families import FAMILIES, Entrant
from lospmm.ir import KernelProgram, launch
from lospmm.lower import lower
from lospmm.model import Candidate, Compiled, Launch, Problem
from lospmm.packed import PackedKernel, emission_of
from lospmm.store import Store
from lospmm.toolchain.compile import Binary, compile_kernel
from lospmm.words import Words


@dataclass(frozen=True, slots=True)
class Build:
    program: KernelProgram
    emission: Emission
    binary: Binary

    @property
    def language(self) -> str:
        return self.emission.language

    @property
    def dtype(self) -> Dtype:
        return self.program.dtype

    @property
    def words(self) -> Words:
        return self.program.words

    @property
    def launch(self) -> Launch:
        return launch(self.program)

    @property
    def compiled(self) -> Compiled:
        return Compiled(self.binary.cubin, self.program.name, self.launch)


@dataclass(frozen=True, slots=True)
class Written:
    """What is shipped of a ``Build``, without what it was made of."""

    language: str
    compiled: Compiled
    binary: Binary
    source: str  # beside the cubin
    dtype: Dtype
    words: Words

    @property
    def launch(self) -> Launch:
        return self.compiled.launch


@dataclass(frozen=True, slots=True)
class PackedBuild:
    """The same of a family's plan."""

    entrant: Entrant
    kernel: PackedKernel
    emission: Emission
    binary: Binary

    @property
    def language(self) -> str:
        return self.emission.language

    @property
    def launch(self) -> Launch:
        return self.kernel.launch

    @property
    def compiled(self) -> Compiled:
        return Compiled(self.binary.cubin, self.kernel.entry, self.launch)


def _unwatched(_stage: str) -> AbstractContextManager[None]:
    return nullcontext()


def build(
    problem: Problem,
    candidate: Candidate,
    emitter: str,
    *,
    store: Store,
    workers: int,
    stage: Callable[[str], AbstractContextManager[None]] = _unwatched,
    progress: Callable[[int, int], None] | None = None,
    cancel: threading.Event | None = None,
) -> Build:
    """The kernel of ``candidate``, compiled; each step runs within ``stage`` of its name, "emit" or "compile".

    Raises Unsupported, ToolchainFault, and CancelledError.
    """
    arch = problem.device.arch
    with stage("emit"):
        program = lower(problem, candidate)
        emission = emit(program, emitter, arch)
    with stage("compile"):
        registers = program.registers
        binary = compile_kernel(
            emission, arch=arch, registers=registers, store=store, workers=workers, progress=progress, cancel=cancel
        )
    return Build(program, emission, binary)


def written(problem: Problem, candidate: Candidate | Entrant, emitter: str, store: Store) -> Written | PackedBuild:
    """``build`` with the text that is shipped beside the cubin; or ``build_packed``, which has it. Raises as they."""
    if isinstance(candidate, Entrant):
        return build_packed(problem, candidate, store=store, workers=1)
    made = build(problem, candidate, emitter, store=store, workers=1)
    source = source_of(made.program, made.emission, problem.device.arch)
    return Written(made.language, made.compiled, made.binary, source, made.dtype, made.words)


def build_packed(
    problem: Problem,
    entrant: Entrant,
    *,
    store: Store,
    workers: int,
    stage: Callable[[str], AbstractContextManager[None]] = _unwatched,
    progress: Callable[[int, int], None] | None = None,
    cancel: threading.Event | None = None,
) -> PackedBuild:
    """The same of a family's plan, whose template is compiled once for all matrices. Raises as ``build`` does."""
    with stage("emit"):
        kernel = FAMILIES[entrant.family].pack(problem, entrant.plan)
        emission = emission_of(kernel)
    with stage("compile"):
        binary = compile_kernel(
            emission,
            arch=problem.device.arch,
            registers=kernel.registers,
            store=store,
            workers=workers,
            progress=progress,
            cancel=cancel,
        )
    return PackedBuild(entrant, kernel, emission, binary)


def for_emitter(problem: Problem, emitter: str) -> Problem:
    """``problem`` with what a thread needs beside its accumulators and buffers: a compiler needs more than we do."""
    compiled = problem.device.reserved_registers + layer_registers(problem)
    reserved = reserved_registers(problem) if emitter == "sass" else compiled
    return replace(problem, device=replace(problem.device, reserved_registers=reserved))
