"""Compilation of an emission to a cubin: units are compiled in parallel, cached, and linked.

Machine code has one unit, its prologue: the tiles are appended to ptxas's output instead of being linked. Compile
time is about proportional to a unit's length, so the longest go first. A compiled unit is kept in the store under
everything that determines the output: the compiler and its version, its options and the text.
"""

import hashlib
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from lospmm.codegen.emission import Emission
from lospmm.errors import DiskFault, system_errors
from lospmm.problem.launch import Launch
from lospmm.store import Store
from lospmm.toolchain import elf, lifetime
from lospmm.toolchain.compilers import COMPILERS, Compiler, of_whole_programs
from lospmm.toolchain.cubin import graft
from lospmm.toolchain.data import embed
from lospmm.toolchain.discover import check_arch, find_toolkit
from lospmm.toolchain.faults import compiler_fault
from lospmm.toolchain.process import compile_limits, run

#: Part of every unit's key: raise it when the stored form of a unit changes.
UNIT_FORMAT = 1

#: Seconds between two checks for cancellation while units compile.
POLL_SECONDS = 0.1

_SPILLS = re.compile(r"\d+ bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")

_ONLY_DATA = re.compile(r"info\s*: \d+ bytes gmem\s*$")


@dataclass(frozen=True, slots=True)
class Binary:
    """A linked kernel and its resources."""

    cubin: bytes
    registers: int  # per thread
    spill_bytes: int  # stores and loads of spilled registers, over all tiles, per thread
    stack_bytes: int  # per thread
    code_bytes: int  # machine code of all tiles
    toolchain: str  # "ptxas 13.0.88 (PyPI)"


@dataclass(frozen=True, slots=True)
class _Compilation:
    """What the compilations of all units of an emission share."""

    units: tuple[str, ...]
    compiler: Compiler
    store: Store
    directory: Path
    stop: threading.Event  # set when a unit failed or the whole was cancelled


def compile_kernel(
    emission: Emission,
    *,
    arch: str,
    registers: int,
    store: Store,
    workers: int,
    progress: Callable[[int, int], None] | None = None,
    cancel: threading.Event | None = None,
) -> Binary:
    """Compile and link an emission for ``arch`` with at most ``registers`` per thread.

    ``workers`` compilers run at a time. ``progress`` is called with (units done, units). Raises Unsupported if the
    toolkit has no such architecture, ToolchainFault if a compiler fails and CancelledError once ``cancel`` is set.
    """
    toolkit = find_toolkit()
    check_arch(toolkit, arch)
    if emission.is_specific and arch[-1].isdigit():
        arch += "a"
    compiler = COMPILERS[emission.language](toolkit, arch, registers)
    is_alone = emission.data is not None and len(emission.units) == 1
    if is_alone:
        compiler = of_whole_programs(compiler)
    with lifetime.temporary_directory() as directory:
        job = _Compilation(emission.units, compiler, store, directory, threading.Event())
        spill_bytes = _compile_all(job, workers, progress, cancel)
        if is_alone:
            cubin = (directory / _object(0)).read_bytes()
        elif emission.machine is None:
            cubin = _link(toolkit.nvlink, arch, len(emission.units), directory, cancel)
        else:
            cubin = graft((directory / _object(0)).read_bytes(), emission.machine, emission.entry)
        if emission.data is not None:
            cubin = embed(cubin, emission.data)
    usage = elf.kernel_usage(cubin, emission.entry)
    return Binary(
        cubin=cubin,
        registers=usage.registers,
        spill_bytes=spill_bytes,
        stack_bytes=usage.stack_bytes,
        code_bytes=elf.code_bytes(cubin),
        toolchain=compiler.title,
    )


def _compile_all(
    job: _Compilation, workers: int, progress: Callable[[int, int], None] | None, cancel: threading.Event | None
) -> int:
    """Compile all units into the job's directory, and return the bytes that they spill.

    The first failure stops the others and is raised.
    """
    longest_first = sorted(range(len(job.units)), key=lambda index: len(job.units[index]), reverse=True)
    ended: SimpleQueue[Future[int]] = SimpleQueue()
    spilled: list[int] = []
    pool = ThreadPoolExecutor(workers, thread_name_prefix="compile")
    try:
        for index in longest_first:
            pool.submit(_compile_unit, job, index).add_done_callback(ended.put)
        while len(spilled) < len(job.units):
            if cancel is not None and cancel.is_set():
                raise CancelledError
            try:
                spilled.append(ended.get(timeout=POLL_SECONDS).result())
            except Empty:
                continue
            if progress is not None:
                progress(len(spilled), len(job.units))
    finally:
        job.stop.set()
        pool.shutdown(cancel_futures=True)
    return sum(spilled)


def _compile_unit(job: _Compilation, index: int) -> int:
    """Put the object of a unit into the job's directory, and return the bytes that it spills."""
    text, target = job.units[index], job.directory / _object(index)
    key = _unit_key(job.compiler, text)
    if kept := job.store.get("unit", key):
        target.write_bytes(kept["unit.o"])
        return int(kept["spill_bytes"])
    source = target.with_suffix(job.compiler.suffix)
    source.write_text(text)
    finished = run(
        (*job.compiler.program, *job.compiler.options, source.name, "-o", target.name),
        cwd=job.directory,
        limits=compile_limits(),
        cancel=job.stop,
        environment=job.compiler.environment,
    )
    if finished.failure is not None:
        raise compiler_fault(f"{job.compiler.name}, unit {index + 1} of {len(job.units)}", finished, text)
    said = finished.stdout + finished.stderr
    spills = _SPILLS.findall(said)
    if not spills and not _ONLY_DATA.search(said):
        raise compiler_fault(f"{job.compiler.name} did not tell what it spilled", finished, text)
    spill_bytes = sum(int(stores) + int(loads) for stores, loads in spills)
    job.store.put("unit", key, {"unit.o": target.read_bytes(), "spill_bytes": str(spill_bytes).encode()})
    return spill_bytes


def _unit_key(compiler: Compiler, text: str) -> str:
    decisive = json.dumps([UNIT_FORMAT, compiler.name, compiler.options])
    return hashlib.sha256(f"{decisive}\n{text}".encode()).hexdigest()


def _object(index: int) -> str:
    return f"{index}.o"


def _link(nvlink: Path, arch: str, count: int, directory: Path, cancel: threading.Event | None) -> bytes:
    objects = "\n".join(_object(index) for index in range(count))
    (directory / "objects").write_text(objects)  # thousands of names are too long for a command line
    finished = run(
        (nvlink, f"-arch={arch}", "--options-file", "objects", "-o", "kernel.cubin"),
        cwd=directory,
        limits=compile_limits(),
        cancel=cancel,
    )
    if finished.failure is not None:
        raise compiler_fault("nvlink", finished, objects)
    return (directory / "kernel.cubin").read_bytes()


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled kernel and its launch."""

    cubin: bytes
    entry: str
    launch: Launch


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A compiled kernel whose cubin stays on disk; the parent process never reads it."""

    cubin: Path
    entry: str
    launch: Launch
    build: object = None  # ``tuning.build.Build`` without the cubin, of a packed kernel


def on_disk(built: Compiled, folder: Path, build: object) -> OnDisk:
    """Write a kernel's cubin to a new file of ``folder``. Raises DiskFault."""
    with system_errors(DiskFault, f"{folder}: cannot be written"):
        number, name = tempfile.mkstemp(".cubin", dir=folder)
        with os.fdopen(number, "wb") as file:
            file.write(built.cubin)
    return OnDisk(Path(name), built.entry, built.launch, build)


#: A kernel, or a proxy of one, that can be run.
Built = Compiled | OnDisk
