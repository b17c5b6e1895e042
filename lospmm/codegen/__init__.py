"""Emitters: a ``KernelProgram`` in, an ``Emission`` out. To add a language, add its module and a row to ``EMITTERS``.

An emitter writes each tile as a function of its own that never returns, and a kernel that jumps to the function of
its block row. A function that never returns saves nothing for its caller (the calling convention would otherwise spill
registers around every call), and functions of their own compile apart. Emitted text is deterministic: no time, no
path, one statement per line, weights as bit patterns or hexadecimal floats, the tile's rows of A in a comment.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lospmm.codegen import cuda, ptx
from lospmm.codegen.emission import Emission
from lospmm.errors import Unsupported
from lospmm.ir import KernelProgram

#: Language -> emitter; the second argument is the architecture, as in "sm_90".
EMITTERS: Mapping[str, Callable[[KernelProgram, str], Emission]] = MappingProxyType(
    {"ptx": ptx.emit, "cuda": cuda.emit}
)


def check_target(language: str, arch: str) -> None:
    """Raises Unsupported for an architecture that ``language`` cannot be emitted for."""
    if language == "ptx":
        ptx.version_of(arch)


def emit(program: KernelProgram, language: str, arch: str) -> Emission:
    """The text of ``program``. Raises Unsupported for a language without an emitter."""
    if language not in EMITTERS:
        raise Unsupported(f"emitter {language!r}: choose one of {', '.join(EMITTERS)}")
    return EMITTERS[language](program, arch)
