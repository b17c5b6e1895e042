"""A kernel's tiles as machine code, and what they agree on with the code that runs before them.

The prologue (``prologue``) finds a thread's column, leaves if there is none, and jumps to the tile of its block row,
with three things in registers: the addresses of row 0 of its column in B and in C, and the descriptor of global memory.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Entry:
    """The registers that a tile finds filled: two pairs of registers with addresses, one of uniform registers."""

    b: int
    c: int
    descriptor: int


#: What ptxas 13.0 makes of the prologue. Where another one chooses otherwise, the tiles' registers are renamed.
ENTRY = Entry(b=2, c=4, descriptor=6)


@dataclass(frozen=True, slots=True, eq=False)
class MachineCode:
    """All tiles, one after another: rows of FORM, and where each begins.

    ``registers`` is what a thread of the kernel is given (REGCOUNT): the highest register used plus 3, since the
    hardware keeps two.
    """

    form: NDArray[np.void]  # of FORM
    starts: NDArray[np.int64]  # the row at which each tile begins
    dispatch: tuple[int, ...]  # the tile of each block row
    registers: int
    entry: Entry
    arch: str = "sm_90"
