"""A kernel's tiles as machine code, and the registers that the prologue fills for them.

The prologue (``prologue``) finds a thread's column, leaves if there is none, and jumps to the tile of its block row,
with three things in registers: the addresses of row 0 of its column in B and in C, and the descriptor of global
memory. Where several blocks share a tile, two more: where mailboxes are, and the bytes of a slot (``exchange``). All
slots of a block lie row after row, one element per thread.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.sass.form import Opcode, blank


@dataclass(frozen=True, slots=True)
class EntryRegisters:
    """The registers that hold values when a tile begins: pairs for addresses, and a uniform descriptor.

    ``peers`` is a pair with two addresses in the shared memory of the cluster's block 0: of the thread's word of what
    its mailbox begins with, and of its barrier; in block i they lie ``PEER_BYTES`` * i further. ``slot_bytes`` is a
    register with the bytes of a slot of the block's threads, in the first of them, and 0 in the others.
    ``residual`` is a pair with the address of row 0 of the residual's column, ``padded`` the register with the bits
    that say which rows and columns of the thread's window lie in a convolution's padding (``convolution.outside``).
    ``kept`` is a register with the address in shared memory of the sums of the thread's other column (``walks``).
    ``fetched`` is a register with the byte of its tile's code at which a thread begins to load it (``fetch``);
    nothing else in a tile reads it.
    """

    b: int
    c: int
    descriptor: int
    peers: int | None = None
    slot_bytes: int | None = None
    residual: int | None = None
    padded: int | None = None
    kept: int | None = None
    fetched: int | None = None

    @property
    def filled(self) -> frozenset[int]:
        """Every register that holds a value when a tile begins."""
        return self.taken if self.fetched is None else self.taken | {self.fetched}

    @property
    def taken(self) -> frozenset[int]:
        """Every register that holds its value for a whole tile."""
        pairs = [pair for pair in (self.b, self.c, self.peers, self.residual) if pair is not None]
        single = [register for register in (self.slot_bytes, self.padded, self.kept) if register is not None]
        return frozenset([*(pair + half for pair in pairs for half in (0, 1)), *single])


#: Registers that ptxas 13.0 chooses in the prologue. If it chooses others, the tiles' registers are renamed.
ENTRY = EntryRegisters(b=2, c=4, descriptor=6)
CLUSTER_ENTRY = EntryRegisters(b=2, c=4, descriptor=8, peers=6, slot_bytes=0)
WALKS_ENTRY = EntryRegisters(b=2, c=4, descriptor=8, kept=9)


#: Registers that the hardware keeps.
HARDWARE_REGISTERS = 2

#: A tile starts where a line of the instruction caches does: 128 bytes.
LINE_INSTRUCTIONS = 8

#: Bytes of code that a load of one word brings into the L2 cache: it reads memory by pairs of sectors.
TOUCHED_BYTES = 64

#: Distance of the shared memories of two blocks of a cluster, as addresses of the cluster (ptxas's code for ``mapa``).
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
    entry: EntryRegisters
    arch: str = "sm_90"
    split_k: int = 1  # parts of a tile, next to each other in ``dispatch``


def padding(length: int) -> NDArray[np.void]:
    """Return the NOPs that fill the last line of a tile of ``length`` instructions; they never run."""
    form = blank(-length % LINE_INSTRUCTIONS)
    form["op"], form["stall"], form["yields"] = Opcode.NOP, 0, 1
    return form
