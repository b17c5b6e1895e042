"""From a candidate to a kernel that a GPU loads: swap rows, lower, emit, compile."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lospmm.codegen import emit, source_of
from lospmm.codegen.emission import Emission
from lospmm.codegen.ir import KernelProgram, launch
from lospmm.codegen.lower import lower, with_swaps
from lospmm.codegen.sass.scheduler import layer_registers, reserved_registers
from lospmm.families import FAMILIES, shared_of
from lospmm.families.candidate import Candidate
from lospmm.families.packed import PackedKernel
from lospmm.problem.dtype import Dtype
from lospmm.problem.lanes import Lanes
from lospmm.problem.problem import Problem
from lospmm.store import Store, made_together
from lospmm.toolchain.compile import Binary, Compiled, OnDisk, compile_kernel, on_disk
from lospmm.toolchain.template import emission_of


@dataclass(frozen=True, slots=True, eq=False)
class Build:
    """A built kernel: its cubin and launch, and what its manifest needs.

    ``program`` and ``emission`` are what an unrolled kernel was built from; they stay in the process that built it.
    """

    language: str
    compiled: Compiled
    binary: Binary
    dtype: Dtype
    words: Lanes | None = None  # unrolled kernels: the words of a thread
    kernel: PackedKernel | None = None  # other families: A as data, and the template
    candidate: Candidate | None = None  # unrolled kernels: with swapped rows
    program: KernelProgram | None = None
    emission: Emission | None = None
    source: str | None = None  # the text shipped with the cubin; None: not written yet


def build(
    problem: Problem,
    candidate: Candidate,
    emitter: str,
    *,
    store: Store,
    workers: int,
    stage: Callable[[str], AbstractContextManager[object]] = nullcontext,
    progress: Callable[[int, int], None] | None = None,
    cancel: threading.Event | None = None,
) -> Build:
    """Build the kernel of ``candidate``; a template is compiled once for all matrices.

    Each step runs in the context ``stage(name)``, "emit" or "compile"; ``progress`` is called with (done, total) units
    compiled.

    Raises Unsupported, ToolchainFault, and CancelledError.
    """
    arch = problem.device.arch
    compiled = partial(compile_kernel, arch=arch, store=store, workers=workers, progress=progress, cancel=cancel)
    if not candidate.is_unrolled:
        with stage("emit"):
            prepare(problem, [candidate], store)
            kernel = FAMILIES[candidate.family].pack(problem, candidate.plan)
            emission = emission_of(kernel)
        with stage("compile"):
            binary = compiled(emission, registers=kernel.registers)
        found = Compiled(binary.cubin, kernel.entry, kernel.launch)
        return Build(emission.language, found, binary, problem.dtype, kernel=kernel, source=kernel.source)
    with stage("emit"):
        candidate = replace(candidate, plan=with_swaps(problem, candidate.plan))
        program = lower(problem, candidate.plan)
        emission = emit(program, emitter, arch)
    with stage("compile"):
        binary = compiled(emission, registers=program.registers)
    found = Compiled(binary.cubin, program.name, launch(program))
    made = emission.language, found, binary, program.dtype, program.words
    return Build(*made, candidate=candidate, program=program, emission=emission)


def shares_packing(problem: Problem, candidate: Candidate) -> bool:
    """Say whether a packing step of ``candidate`` is shared with others (``prepare``)."""
    return shared_of(problem, candidate) is not None


def prepare(problem: Problem, candidates: Sequence[Candidate], store: Store) -> None:
    """Run the packing steps of ``candidates`` that several processes can share."""
    for candidate in candidates:
        if (work := shared_of(problem, candidate)) is not None:
            work(partial(made_together, store))


def with_source(built: Build, arch: str) -> Build:
    """Return ``built`` as it is shipped: with its source text, without ``program`` and ``emission``."""
    if built.program is None or built.emission is None:
        return built
    text = source_of(built.program, built.emission, arch)
    return replace(built, program=None, emission=None, source=text)


def with_cubin(built: Build, cubin: bytes, data: bytes) -> Build:
    """Return the build of a packed kernel with another cubin, or none, and the data in it."""
    assert built.kernel is not None, "it is packed"
    compiled, binary = replace(built.compiled, cubin=cubin), replace(built.binary, cubin=cubin)
    return replace(built, compiled=compiled, binary=binary, kernel=replace(built.kernel, data=data))


def build_into(problem: Problem, candidate: Candidate, emitter: str, store: Store, folder: Path) -> OnDisk:
    """Build a kernel, with its cubin in a new file of ``folder``. Raises DiskFault, and as ``build``."""
    made = build(problem, candidate, emitter, store=store, workers=1)
    rest = None if made.kernel is None else with_cubin(made, b"", b"")  # the source of an unrolled one costs a build
    return on_disk(made.compiled, folder, rest)


def build_with_source(problem: Problem, candidate: Candidate, emitter: str, store: Store) -> Build:
    """Build the kernel of ``candidate`` with its source text. Raises as ``build``."""
    return with_source(build(problem, candidate, emitter, store=store, workers=1), problem.device.arch)


def for_emitter(problem: Problem, emitter: str) -> Problem:
    """Return ``problem`` with the registers that ``emitter`` reserves per thread for addresses and calls.

    A compiler needs more of them than machine code.
    """
    compiled = problem.device.reserved_registers + layer_registers(problem)
    reserved = reserved_registers(problem) if emitter == "sass" else compiled
    return replace(problem, device=replace(problem.device, reserved_registers=reserved))
