"""Exchange of sums among the blocks of a cluster, which share a tile.

Each block has a mailbox in shared memory: a barrier (an mbarrier), and behind it slots of one word a thread. STAS
stores a sum in a slot of another block and tells the barrier there of its bytes; the receiver waits until those of all
its slots have come. So no block waits for what it sent, and the cluster meets once, before the first sum is sent: then
each block has started and made its barrier.

A block's first thread tells its barrier how many bytes will come. Addresses of other blocks are in registers of
buffers: no element of B is used any more.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.ops import Op
from lospmm.codegen.sass.addresses import ADDRESS_SCOREBOARD, ADDRESSES_OUTSTANDING, ALU_LATENCY, pause
from lospmm.codegen.sass.form import Opcode, blank
from lospmm.codegen.sass.layer import Piece
from lospmm.codegen.sass.listing import BYTES_PER_INSTRUCTION
from lospmm.codegen.sass.machine import PEER_BYTES, EntryRegisters
from lospmm.problem.dtype import FLOAT_BYTES
from lospmm.space.candidates import BARRIER_BYTES

#: Cycles behind the meeting of a cluster, and a branch; ptxas sets the second.
MEETING_STALL, BRANCH_STALL = 6, 5

#: Of the thread that tells the barrier, then of the barrier's answer; guards of padding are lower.
_PREDICATE = 6

Row = dict[str, int]


class Mailbox(NamedTuple):
    """The slots of each part of a tile."""

    slots: int
    slot_bytes: int

    def places(self, slots: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the part that owns each slot, and how far behind its barrier the slot begins."""
        part, within = np.divmod(slots, max(self.slots, 1))
        return part, BARRIER_BYTES + within * self.slot_bytes


def exchange(
    form: NDArray[np.void],
    code: NDArray[np.void],
    mailbox: Mailbox,
    entry: EntryRegisters,
    accumulators: NDArray[np.uint8],
    buffers: NDArray[np.uint8],
) -> list[Piece]:
    """Set sends and collects; return the instructions around them, by row.

    ``buffers`` has ``least_buffers`` registers, or more.
    """
    assert entry.peers is not None and entry.slot_bytes is not None
    sends, collects, met = (np.flatnonzero(code["op"] == op) for op in (Op.SEND, Op.COLLECT, Op.EXCHANGE))
    begin: list[Row] = [{"op": Opcode.CLUSTER_WAIT, "stall": MEETING_STALL}]
    if len(met) == 0:  # this block only writes zeros
        return [(0, _rows(begin))]
    form["op"][met] = Opcode.NOP
    blocks = _send(form, code, sends, mailbox, accumulators, buffers)
    if len(collects):
        blocks[entry.peers] = _collect(form, code, collects, mailbox, entry.peers, buffers)
        begin.append({"op": Opcode.LOP3_TEST, "ra": entry.slot_bytes, "immediate": 0xFFFFFFFF, "carry": _PREDICATE})
        # As floats, these integers are denormal: their products are exact.
        factor = int(np.float32(len(collects)).view(np.uint32))
        begin.append({"op": Opcode.FFMA_IMM, "ra": entry.slot_bytes, "rd": entry.slot_bytes, "immediate": factor})
    moves = [(pair, block) for pair, block in blocks.items() if block or pair != entry.peers]
    for pair, block in moves:
        for half in (0, 1):
            moved = {"rd": pair + half, "ra": entry.peers + half, "immediate": block * PEER_BYTES}
            begin.append({"op": Opcode.IADD3, **moved})
    if len(begin) > 1:
        begin[1]["wait"] = 1 << ADDRESS_SCOREBOARD  # loads of B may be on it
        begin[-1] |= {"stall": ALU_LATENCY, "yields": 1}
    pieces = []
    if len(collects):
        barrier = entry.peers + 1
        expect = {"ra": barrier, "rb": entry.slot_bytes, "predicate": _PREDICATE}
        begin.append({"op": Opcode.EXPECT, **expect, "read_barrier": ADDRESS_SCOREBOARD, "stall": 2})
        wait = {"ra": barrier, "carry": _PREDICATE, "write_barrier": ADDRESS_SCOREBOARD, "stall": 2}
        again = {"predicate": _PREDICATE, "predicate_negated": 1, "offset": -2 * BYTES_PER_INSTRUCTION}
        again |= {"wait": 1 << ADDRESS_SCOREBOARD, "stall": BRANCH_STALL}
        pieces.append((int(met[0]) + 1, _rows([{"op": Opcode.AWAIT, **wait}, {"op": Opcode.BRA, **again}])))
    return [(int(sends[0] if len(sends) else met[0]), _rows(begin)), *pieces]


def _send(
    form: NDArray[np.void],
    code: NDArray[np.void],
    sends: NDArray[np.intp],
    mailbox: Mailbox,
    accumulators: NDArray[np.uint8],
    buffers: NDArray[np.uint8],
) -> dict[int, int]:
    """Set ``sends``; return the block that each register pair of theirs must point to."""
    part, offset = mailbox.places(code["target"][sends])
    blocks, which = np.unique(part, return_inverse=True)
    pairs = buffers[:-1][(buffers[:-1] % 2 == 0) & (np.diff(buffers) == 1)][: len(blocks)]
    form["op"][sends], form["bytes"][sends], form["ra"][sends] = Opcode.STAS, FLOAT_BYTES, pairs[which]
    form["rb"][sends], form["offset"][sends] = accumulators[code["source"][sends]], offset
    form["read_barrier"][sends] = ADDRESS_SCOREBOARD
    pause(form, sends[ADDRESSES_OUTSTANDING::ADDRESSES_OUTSTANDING])
    return dict(zip(pairs.tolist(), blocks.tolist(), strict=True))


def _collect(
    form: NDArray[np.void],
    code: NDArray[np.void],
    collects: NDArray[np.intp],
    mailbox: Mailbox,
    address: int,
    buffers: NDArray[np.uint8],
) -> int:
    """Set ``collects``; return the block that ``address`` must point to, which is the part's own."""
    part, offset = mailbox.places(code["source"][collects])
    form["op"][collects], form["bytes"][collects], form["ra"][collects] = Opcode.LDS, FLOAT_BYTES, address
    form["rd"][collects], form["offset"][collects] = buffers[code["target"][collects]], offset
    return int(part[0])


def _rows(rows: list[Row]) -> NDArray[np.void]:
    form = blank(len(rows))
    for number, row in enumerate(rows):
        for name, value in row.items():
            form[name][number] = value
    return form
