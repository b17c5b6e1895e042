"""A kernel's tiles as machine code, and what they agree on with the code that runs before them.

The prologue (``prologue``) finds a thread's column, leaves if there is none, and jumps to the tile of its block row,
with three things in registers: the addresses of row 0 of its column in B and in C, and the descriptor of global memory.
Where several blocks share a tile, two more: where this thread finds its slots of the mailbox in its own shared memory,
and where those of its column find theirs. All slots of a block lie row after row, one element per thread.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Entry:
    """The registers that a tile finds filled: two pairs of registers with addresses, one of uniform registers.

    ``mailbox`` is a register with the address of this thread's slot 0 in shared memory, ``peers`` a pair with the
    generic address of the same slot in the cluster's block 0; in block i it lies ``PEER_BYTES`` * i further.
    """

    b: int
    c: int
    descriptor: int
    peers: int | None = None
    mailbox: int | None = None

    @property
    def taken(self) -> frozenset[int]:
        """Every register that holds something."""
        pairs = [pair for pair in (self.b, self.c, self.peers) if pair is not None]
        single = [] if self.mailbox is None else [self.mailbox]
        return frozenset([*(pair + half for pair in pairs for half in (0, 1)), *single])


#: What ptxas 13.0 makes of the prologue. Where another one chooses otherwise, the tiles' registers are renamed.
ENTRY = Entry(b=2, c=4, descriptor=6)
CLUSTER_ENTRY = Entry(b=2, c=4, descriptor=8, peers=6, mailbox=0)

#: Between the shared memories of two blocks of a cluster, as generic addresses (ptxas's code for ``mapa``).
PEER_BYTES = 1 << 24


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
    split_k: int = 1  # parts of a tile, next to each other in ``dispatch``
