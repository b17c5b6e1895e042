"""The threads that run machine code together: their registers, their columns of B and C, and their block."""

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.sass.form import PT, RZ
from lospmm.codegen.sass.machine import Entry
from lospmm.ir import FLOAT_BYTES
from lospmm.runtime.cluster import Block
from lospmm.runtime.fault import Fault
from lospmm.runtime.geometry import B_ADDRESS, C_ADDRESS, Geometry, stray_access

#: What R255 is written to: nobody reads it.
NOWHERE = 256

#: What registers hold before anything is written to them: no number.
_UNKNOWN = 0x7FFFDEAD

WORD_MASK = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(32)


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """B or C: where it lies, where each thread finds row 0 of its column, how long a row is, the chosen columns."""

    name: str
    address: int
    own: NDArray[np.uint64]  # (threads,)
    row_bytes: np.uint64
    elements: NDArray[np.float32]  # (rows, threads)

    def part(self, which: NDArray[np.bool_]) -> "Operand":
        return Operand(self.name, self.address, self.own[which], self.row_bytes, self.elements[:, which])


@dataclass(frozen=True, slots=True, eq=False)
class Warp:
    """The state of the threads that run together."""

    columns: NDArray[np.int64]  # (threads,)
    lanes: NDArray[np.int64]  # (threads,): 0, 1, ...
    b: Operand
    c: Operand
    words: NDArray[np.uint32]  # (registers, threads)
    floats: NDArray[np.float32]  # the same memory
    predicates: NDArray[np.bool_]  # (8, threads)
    block: Block

    def part(self, which: NDArray[np.bool_]) -> "Warp":
        """Some of the threads, in copies of their state."""
        columns, words, predicates = self.columns[which], self.words[:, which], self.predicates[:, which]
        b, c, lanes = self.b.part(which), self.c.part(which), np.arange(len(columns))
        return Warp(columns, lanes, b, c, words, words.view(np.float32), predicates, self.block)

    def put_back(self, part: "Warp", which: NDArray[np.bool_]) -> None:
        """Take over what ``part(which)`` has become."""
        self.words[:, which], self.predicates[:, which] = part.words, part.predicates
        self.c.elements[:, which] = part.c.elements

    def address(self, pair: int, offset: int) -> NDArray[np.uint64]:
        """What each thread addresses with a pair of registers, ``offset`` bytes further, (threads,)."""
        high = self.words[pair if pair == RZ else pair + 1].astype(np.uint64)
        return cast(NDArray[np.uint64], (high << WORD_BITS | self.words[pair]) + np.uint64(offset % 2**64))

    def own_rows(self, operand: Operand, address: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The row of its own column that each thread addresses, (threads,). Raises Fault for any other address."""
        rows, rest = np.divmod(address - operand.own, operand.row_bytes)
        stray = (rest != 0) | (rows >= len(operand.elements))
        if stray.any():
            first = int(stray.argmax())
            offset = int((address[first : first + 1] - np.uint64(operand.address)).astype(np.int64)[0])
            raise Fault(stray_access(operand.name, offset, int(self.columns[first])))
        return cast(NDArray[np.uint64], rows)


def at_entry(
    entry: Entry,
    geometry: Geometry,
    b: NDArray[np.float32],
    c: NDArray[np.float32],
    block: Block,
) -> Warp:
    """The threads of ``block`` at the start of its part of a tile."""
    columns = block.columns
    words = np.full((NOWHERE + 1, len(columns)), _UNKNOWN, dtype=np.uint32)
    words[RZ] = 0
    offsets = columns.astype(np.uint64) * np.uint64(FLOAT_BYTES)
    row_bytes = np.uint64(geometry.n * FLOAT_BYTES)
    operand_b = Operand("B", B_ADDRESS, offsets + np.uint64(B_ADDRESS), row_bytes, b)
    operand_c = Operand("C", C_ADDRESS, offsets + np.uint64(C_ADDRESS), row_bytes, c)
    for register, address in ((entry.b, operand_b.own), (entry.c, operand_c.own), (entry.peers, block.peers)):
        if register is not None:
            words[register], words[register + 1] = address & WORD_MASK, address >> WORD_BITS
    if entry.mailbox is not None:
        words[entry.mailbox] = block.mailbox
    predicates = np.zeros((PT + 1, len(columns)), np.bool_)
    predicates[PT] = True
    lanes = np.arange(len(columns))
    return Warp(columns, lanes, operand_b, operand_c, words, words.view(np.float32), predicates, block)
