"""Output of an emitter: a kernel as text or machine code, whole and in units."""

from dataclasses import dataclass
from typing import Literal

from lospmm.codegen.sass.machine import MachineCode

Language = Literal["cuda", "ptx", "sass", "template"]


@dataclass(frozen=True, slots=True)
class Emission:
    """One emitted kernel; ``source`` is the whole kernel as one file, which is shipped beside the cubin.

    ``units`` is the same code as translation units that are compiled separately and linked: compile time grows faster
    than a function's length, and separate units use every core. Each unit holds one or several tiles, the last one
    the kernel ``entry`` that dispatches to them.

    Machine code has no source: ``machine`` holds the tiles, and the only unit is the prologue before them. A listing
    is shipped, made when it is needed (``codegen.source_of``): a kernel that is only timed needs none.

    One unit of a packed kernel (``lospmm.families.packed``) is its template, and ``data`` is what the code reads; if
    it is the only unit, nothing is linked. A kernel that ``is_specific`` is compiled for one architecture alone, as
    in sm_90a.
    """

    language: Language
    entry: str
    source: str
    units: tuple[str, ...]
    machine: MachineCode | None = None
    data: bytes | None = None
    is_specific: bool = False
