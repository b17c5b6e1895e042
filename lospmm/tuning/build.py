"""From a candidate to a kernel that a GPU loads: lower, emit, compile."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Required, TypedDict, Unpack, overload

from lospmm.codegen import emit, source_of
from lospmm.codegen.emission import Emission
from lospmm.codegen.ir import KernelProgram, launch
from lospmm.codegen.lower import lower
from lospmm.codegen.sass.reserve import layer_registers, reserved_registers
from lospmm.families import FAMILIES, Candidate, shared_of
from lospmm.families.packed import PackedKernel
from lospmm.problem.dtype import Dtype
from lospmm.problem.lanes import Lanes
from lospmm.problem.problem import Launch, Problem
from lospmm.space.candidates import UnrolledPlan
from lospmm.store import Store, made_together
from lospmm.toolchain.compile import Binary, Compiled, compile_kernel
from lospmm.toolchain.template import emission_of


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
    def words(self) -> Lanes:
        return self.program.words

    @property
    def launch(self) -> Launch:
        return launch(self.program)

    @property
    def compiled(self) -> Compiled:
        return Compiled(self.binary.cubin, self.program.name, self.launch)


@dataclass(frozen=True, slots=True)
class WrittenBuild:
    """What is shipped of a ``Build``, without what it was made of."""

    language: str
    compiled: Compiled
    binary: Binary
    source: str  # beside the cubin
    dtype: Dtype
    words: Lanes

    @property
    def launch(self) -> Launch:
        return self.compiled.launch


@dataclass(frozen=True, slots=True)
class PackedBuild:
    """The same of a family's plan."""

    entrant: Candidate
    kernel: PackedKernel
    emission: Emission
    binary: Binary

    @property
    def language(self) -> str:
        return self.emission.language

    @property
    def source(self) -> str:
        return self.kernel.source

    @property
    def launch(self) -> Launch:
        return self.kernel.launch

    @property
    def compiled(self) -> Compiled:
        return Compiled(self.binary.cubin, self.kernel.entry, self.launch)


def _unwatched(_stage: str) -> AbstractContextManager[None]:
    return nullcontext()


class Making(TypedDict, total=False):
    """How a kernel is built: each step within ``stage`` of its name, "emit" or "compile"; ``progress`` is of the
    latter."""

    store: Required[Store]
    workers: Required[int]
    stage: Callable[[str], AbstractContextManager[None]]
    progress: Callable[[int, int], None] | None
    cancel: threading.Event | None


@overload
def build(problem: Problem, candidate: UnrolledPlan, emitter: str, **making: Unpack[Making]) -> Build: ...
@overload
def build(problem: Problem, candidate: Candidate, emitter: str, **making: Unpack[Making]) -> PackedBuild: ...
@overload
def build(
    problem: Problem, candidate: UnrolledPlan | Candidate, emitter: str, **making: Unpack[Making]
) -> Build | PackedBuild: ...
def build(
    problem: Problem, candidate: UnrolledPlan | Candidate, emitter: str, **making: Unpack[Making]
) -> Build | PackedBuild:
    """The kernel of ``candidate``, compiled; that of a family's plan is its template's, compiled once for all matrices.

    Raises Unsupported, ToolchainFault, and CancelledError.
    """
    stage, arch = making.get("stage", _unwatched), problem.device.arch

    def compiled(emission: Emission, registers: int) -> Binary:
        return compile_kernel(
            emission,
            arch=arch,
            registers=registers,
            store=making["store"],
            workers=making["workers"],
            progress=making.get("progress"),
            cancel=making.get("cancel"),
        )

    if isinstance(candidate, Candidate):
        with stage("emit"):
            prepare(problem, [candidate], making["store"])
            kernel = FAMILIES[candidate.family].pack(problem, candidate.plan)
            emission = emission_of(kernel)
        with stage("compile"):
            return PackedBuild(candidate, kernel, emission, compiled(emission, kernel.registers))
    with stage("emit"):
        program = lower(problem, candidate)
        emission = emit(program, emitter, arch)
    with stage("compile"):
        return Build(program, emission, compiled(emission, program.registers))


def prepare(problem: Problem, entrants: Sequence[Candidate], store: Store) -> None:
    """What of their packing several processes may do together."""
    for entrant in entrants:
        if (work := shared_of(problem, entrant)) is not None:
            work(partial(made_together, store))


def source(built: Build | PackedBuild, arch: str) -> str:
    """The text that is shipped beside the cubin."""
    return built.source if isinstance(built, PackedBuild) else source_of(built.program, built.emission, arch)


def written(
    problem: Problem, candidate: UnrolledPlan | Candidate, emitter: str, store: Store
) -> WrittenBuild | PackedBuild:
    """``build`` with the text that is shipped beside the cubin. Raises as it."""
    made = build(problem, candidate, emitter, store=store, workers=1)
    if isinstance(made, PackedBuild):
        return made
    text = source(made, problem.device.arch)
    return WrittenBuild(made.language, made.compiled, made.binary, text, made.dtype, made.words)


def for_emitter(problem: Problem, emitter: str) -> Problem:
    """``problem`` with what a thread needs beside its accumulators and buffers: a compiler needs more than we do."""
    compiled = problem.device.reserved_registers + layer_registers(problem)
    reserved = reserved_registers(problem) if emitter == "sass" else compiled
    return replace(problem, device=replace(problem.device, reserved_registers=reserved))
