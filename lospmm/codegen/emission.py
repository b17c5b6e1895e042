"""What an emitter makes of a kernel program: text, whole and in pieces."""

from dataclasses import dataclass
from typing import Literal

Language = Literal["cuda", "ptx"]


@dataclass(frozen=True, slots=True)
class Emission:
    """``source`` is the whole kernel as one file that a compiler takes as it is, and what is shipped beside the cubin.

    ``units`` is the same code as translation units to be compiled apart and linked: compilers take time that grows
    faster than a function's length, and separate units use every core. Each unit holds one or several tiles, the
    last one the kernel ``entry`` that dispatches to them.
    """

    language: Language
    entry: str
    source: str
    units: tuple[str, ...]
