"""What an emitter makes of a kernel program: text or machine code, whole and in pieces."""

from dataclasses import dataclass
from typing import Literal

from lospmm.codegen.sass.machine import MachineCode

Language = Literal["cuda", "ptx", "sass", "template"]


@dataclass(frozen=True, slots=True)
class Emission:
    """``source`` is the whole kernel as one file that a compiler takes as it is, and what is shipped beside the cubin.

    ``units`` is the same code as translation units to be compiled apart and linked: compilers take time that grows
    faster than a function's length, and separate units use every core. Each unit holds one or several tiles, the
    last one the kernel ``entry`` that dispatches to them.

    Of machine code there is no source: ``machine`` holds the tiles, and the one unit is the prologue before them. What
    is shipped is a listing, made when it is needed (``codegen.source_of``): a kernel that is only timed needs none.

    Of a packed kernel (``lospmm.families.packed``) one unit is its template, and ``data`` are what the code reads;
    where there is no other, nothing is linked. What ``is_specific`` is compiled for one architecture alone, as in
    sm_90a.
    """

    language: Language
    entry: str
    source: str
    units: tuple[str, ...]
    machine: MachineCode | None = None
    data: bytes | None = None
    is_specific: bool = False
