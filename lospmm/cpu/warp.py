"""The threads that run machine code together: their registers, their columns of B and C, their block."""

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.sass.form import PT, RZ
from lospmm.codegen.sass.machine import TOUCHED_BYTES, EntryRegisters
from lospmm.cpu.cluster import Block, KeptAccumulators, cluster_of
from lospmm.cpu.geometry import B_ADDRESS, C_ADDRESS, RESIDUAL_ADDRESS, Geometry, SassFault, stray_access
from lospmm.problem.convolution import outside

#: The row that writes to R255 go to: it is never read.
NOWHERE = 256

#: The initial value of registers: a NaN.
_UNKNOWN = 0x7FFFDEAD

WORD_MASK = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(32)


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """B, C or the residual: its address, the offsets of the threads' columns, and the chosen columns."""

    name: str
    address: int
    own: NDArray[np.uint64]  # (threads,)
    elements: NDArray[np.float32]  # (rows, threads), of threads with several columns those of each walk in turn

    def part(self, which: NDArray[np.bool_]) -> "Operand":
        """Return the operand for some of the threads."""
        return replace(self, own=self.own[which], elements=self.elements[:, which])


@dataclass(frozen=True, slots=True, eq=False)
class Warp:
    """The state of the threads that run together."""

    columns: NDArray[np.int64]  # (threads,)
    lanes: NDArray[np.int64]  # (threads,): 0, 1, ...
    b: Operand
    c: Operand
    residual: Operand | None
    geometry: Geometry
    words: NDArray[np.uint32]  # (registers, threads)
    floats: NDArray[np.float32]  # the same memory
    predicates: NDArray[np.bool_]  # (8, threads)
    block: Block
    code_bytes: int  # of all tiles
    kept: KeptAccumulators

    def part(self, which: NDArray[np.bool_]) -> "Warp":
        """Return some of the threads, in copies of their state."""
        columns, words, predicates = self.columns[which], self.words[:, which], self.predicates[:, which]
        return replace(
            self,
            columns=columns,
            lanes=np.arange(len(columns)),
            b=self.b.part(which),
            c=self.c.part(which),
            residual=None if self.residual is None else self.residual.part(which),
            words=words,
            floats=words.view(np.float32),
            predicates=predicates,
        )

    def put_back(self, part: "Warp", which: NDArray[np.bool_]) -> None:
        """Take over the state of ``part(which)``."""
        self.words[:, which], self.predicates[:, which] = part.words, part.predicates
        self.c.elements[:, which] = part.c.elements

    def address(self, pair: int, offset: int) -> NDArray[np.uint64]:
        """Return the address of each thread in a register pair plus ``offset`` bytes, (threads,)."""
        high = self.words[pair if pair == RZ else pair + 1].astype(np.uint64)
        return cast(NDArray[np.uint64], (high << WORD_BITS | self.words[pair]) + np.uint64(offset % 2**64))

    def own_rows(
        self, operand: Operand, address: NDArray[np.uint64], lanes: NDArray[np.int64] | slice = slice(None)
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the row of an own column that each thread addresses, and that column's index.

        With ``lanes``, only for these threads. Raises SassFault for any other address.
        """
        columns, places = self.columns[lanes], self.lanes[lanes]
        offset = address - np.uint64(operand.address)
        rows_of = self.geometry.rows_of_b if operand is self.b else self.geometry.rows_of_c
        rows = rows_of(columns, offset)
        for walk in range(1, self.geometry.walks):
            other = rows_of(columns + walk * self.geometry.cols, offset)
            places = np.where(rows < 0, self.lanes + walk * len(self.lanes), places)
            rows = np.where(rows < 0, other, rows)
        stray = rows < 0
        if stray.any():
            first = int(stray.argmax())
            raise SassFault(
                stray_access(operand.name, int(offset[first : first + 1].astype(np.int64)[0]), int(columns[first]))
            )
        return rows, places

    def read_from(self, address: NDArray[np.uint64]) -> Operand:
        """Return the operand that a load reads: B, or the residual if the kernel takes one."""
        if self.residual is not None and (address >> np.uint64(60) == 3).any():
            return self.residual
        return self.b


def warps_at_entry(
    parts: int,
    entry: EntryRegisters,
    geometry: Geometry,
    columns: NDArray[np.int64],
    b: NDArray[np.float32],
    c: NDArray[np.float32],
    code_bytes: int,
    residual: NDArray[np.float32] | None,
) -> list[Warp]:
    """Return the threads of each of the ``parts`` blocks that share a tile, at the start of its part."""
    own_c, lanes = geometry.own_c(columns), np.arange(len(columns))
    operand_b = Operand("B", B_ADDRESS, geometry.own_b(columns) + np.uint64(B_ADDRESS), b)
    operand_c = Operand("C", C_ADDRESS, own_c + np.uint64(C_ADDRESS), c)
    third = None
    if residual is not None:
        third = Operand("the residual", RESIDUAL_ADDRESS, own_c + np.uint64(RESIDUAL_ADDRESS), residual)
    operands, warps = (operand_b, operand_c, third), []
    for block in cluster_of(parts, geometry, columns):
        words = np.full((NOWHERE + 1, len(columns)), _UNKNOWN, dtype=np.uint32)
        words[RZ] = 0
        pairs: list[tuple[int | None, NDArray[np.uint64]]] = [(entry.b, operand_b.own), (entry.c, operand_c.own)]
        pairs += [] if third is None else [(entry.residual, third.own)]
        for register, address in pairs:
            if register is not None:
                words[register], words[register + 1] = address & WORD_MASK, address >> WORD_BITS
        if entry.peers is not None and entry.slot_bytes is not None:
            words[entry.peers], words[entry.peers + 1] = block.peers
            words[entry.slot_bytes] = block.told
        if entry.padded is not None and geometry.convolution is not None:
            words[entry.padded] = outside(geometry.convolution, columns)
        kept = KeptAccumulators(lanes, geometry)
        if entry.kept is not None:
            words[entry.kept] = kept.own
        if entry.fetched is not None:
            words[entry.fetched] = columns % geometry.cols * TOUCHED_BYTES
        predicates = np.zeros((PT + 1, len(columns)), np.bool_)
        predicates[PT] = True
        floats = words.view(np.float32)
        warps.append(Warp(columns, lanes, *operands, geometry, words, floats, predicates, block, code_bytes, kept))
    return warps
