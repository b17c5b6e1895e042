"""Compilers of translation units: text in, relocatable machine code out.

To add a language, add a row to COMPILERS: a function of the toolkit, the architecture and the registers per thread,
whose value is pure data. ``compile.py``, which runs compilers, knows nothing of any of them.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from lospmm.errors import ToolchainFault
from lospmm.toolchain import lifetime
from lospmm.toolchain.discover import PROBE_LIMITS, Toolkit, find_host_compiler, find_toolkit
from lospmm.toolchain.process import run


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler, run as ``*program *options UNIT<suffix> -o UNIT.o``; it prints what ``ptxas -v`` prints.

    ``name`` and ``options`` decide what comes out, with the unit's text; where the program lies does not.
    """

    name: str  # "ptxas 13.0.88"
    origin: str  # where it came from, as in Toolkit
    program: tuple[str, ...]
    options: tuple[str, ...]
    suffix: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Name and version of the compiler, and where it was found."""
        return f"{self.name} ({self.origin})"


def _ptx(toolkit: Toolkit, arch: str, registers: int) -> Compiler:
    return Compiler(
        name=f"ptxas {toolkit.version}",
        origin=toolkit.origin,
        program=(str(toolkit.ptxas),),
        options=(f"-arch={arch}", "-c", "-O1", "--maxrregcount", str(registers), "-v"),
        suffix=".ptx",
    )


def _prologue(toolkit: Toolkit, arch: str, registers: int) -> Compiler:
    """Return ptxas for the prologue of machine code: a whole cubin, with nothing left to link.

    It needs some ten registers; ``graft`` overwrites the register count with what the tiles need.
    """
    return replace(_ptx(toolkit, arch, registers), options=(f"-arch={arch}", "-O1", "-v"))


def _cuda(toolkit: Toolkit, arch: str, registers: int) -> Compiler:
    """Return nvcc, which needs g++ even for device code alone, or NVRTC without g++."""
    host = find_host_compiler()
    if host is None:
        return _nvrtc(arch, registers)
    return Compiler(
        name=f"nvcc {toolkit.version}",
        origin=toolkit.origin,
        # The host compiler is only a preprocessor here, so any version of it will do.
        program=(str(toolkit.nvcc), "-ccbin", str(host), "-allow-unsupported-compiler"),
        options=(f"-arch={arch}", "-rdc=true", "--cubin", f"-maxrregcount={registers}", "-Xptxas", "-v,-O1"),
        suffix=".cu",
    )


def _template(toolkit: Toolkit, arch: str, registers: int) -> Compiler:
    """Return the CUDA compiler at -O3, which loops gain by."""
    compiler = _cuda(toolkit, arch, registers)
    return replace(compiler, options=tuple(option.replace("-O1", "-O3") for option in compiler.options))


def of_whole_programs(compiler: Compiler) -> Compiler:
    """Return ``compiler`` for a unit that is linked with nothing."""
    return replace(compiler, options=tuple(option for option in compiler.options if option != "-rdc=true"))


def _nvrtc(arch: str, registers: int) -> Compiler:
    return Compiler(
        name=f"NVRTC {_nvrtc_version()}",
        origin="cuda-bindings",
        program=_NVRTC,
        options=(
            f"--gpu-architecture={arch}",
            "-default-device",  # constexpr functions bear no annotation
            "-rdc=true",
            f"--maxrregcount={registers}",
            "--ptxas-options=-v",
            "--ptxas-options=-O1",
        ),
        suffix=".cu",
        environment=_python_path(),
    )


#: By path, not by module name: this package is not imported by it (-P keeps its directory out of the import path).
_NVRTC = (sys.executable, "-P", str(Path(__file__).with_name("nvrtc.py")))


def _python_path() -> dict[str, str]:
    """Return this process's import path as a variable, which a compiler's environment lacks."""
    return {"PYTHONPATH": os.pathsep.join(sys.path)}


@cache
def _nvrtc_version() -> str:
    with lifetime.temporary_directory() as directory:
        finished = run((*_NVRTC, "--version"), cwd=directory, limits=PROBE_LIMITS, environment=_python_path())
    if finished.failure is not None:
        raise ToolchainFault(
            "CUDA C++ needs g++ (for nvcc) or NVRTC (cuda-bindings, nvidia-cuda-nvrtc); the ptx emitter needs neither",
            log=finished.stderr,
        )
    return finished.stdout.strip()


COMPILERS: Mapping[str, Callable[[Toolkit, str, int], Compiler]] = MappingProxyType(
    {"ptx": _ptx, "cuda": _cuda, "sass": _prologue, "template": _template}
)


def compiler_name(language: str, arch: str) -> str:
    """Return name and version of the compiler of ``language`` on this machine. Raises ToolchainFault."""
    return COMPILERS[language](find_toolkit(), arch, 0).name
