"""g++ for the CPU runtime: it compiles emitted CUDA C++ unchanged, behind a shim header."""

import hashlib
import json
from pathlib import Path

from lospmm.store import Store
from lospmm.toolchain import lifetime
from lospmm.toolchain.discover import host_compiler_version, required_host_compiler
from lospmm.toolchain.faults import compiler_fault
from lospmm.toolchain.process import compile_limits, run

#: At -O0 straight-line code of any length compiles in linear time; a multiply-add is fused only where the text says so.
OPTIONS = ("-x", "c++", "-std=c++17", "-O0", "-ffp-contract=off", "-shared", "-fPIC", "-include", "shim.h")

#: A packed kernel is loops, which take long without optimization.
BLOCK_OPTIONS = tuple("-O1" if option == "-O0" else option for option in OPTIONS)

LIBRARY = "kernel.so"


def compile_shared_library(text: str, *, header: str, store: Store, options: tuple[str, ...] = OPTIONS) -> bytes:
    """Return the shared library of ``text`` with ``header`` included first; it is cached in the store.

    Raises ToolchainFault if there is no g++ or it fails.
    """
    compiler = required_host_compiler()
    decisive = json.dumps([host_compiler_version(compiler), options, header, text])
    key = hashlib.sha256(decisive.encode()).hexdigest()
    if kept := store.get("library", key):
        return kept[LIBRARY]
    library = _compile(compiler, text, header, options)
    store.put("library", key, {LIBRARY: library})
    return library


def _compile(compiler: Path, text: str, header: str, options: tuple[str, ...]) -> bytes:
    with lifetime.temporary_directory() as directory:
        (directory / "shim.h").write_text(header)
        (directory / "kernel.cu").write_text(text)
        finished = run((compiler, *options, "kernel.cu", "-o", LIBRARY), cwd=directory, limits=compile_limits())
        if finished.failure is not None:
            raise compiler_fault("g++", finished, text)
        return (directory / LIBRARY).read_bytes()
