"""Parts of a tile in machine code: what they send each other, and that each way to lose it is refused."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from lospmm.codegen.sass.form import Opcode
from lospmm.codegen.sass.machine import ENTRY, PEER_BYTES, EntryRegisters, MachineCode
from lospmm.cpu.cluster import SHARED_BYTES
from lospmm.cpu.geometry import Geometry, Run
from lospmm.cpu.sass_machine import execute
from lospmm.errors import VerificationFailed
from lospmm.space.candidates import BARRIER_BYTES
from tests.cpu.drawn_machine_code import code_of, row

#: B and C of four rows and 10 columns, 8 threads a block: 40 bytes a row of B, 32 a slot.
GEOMETRY = Geometry(m=4, k=4, n=10, cols=8, block_rows=2, grid=(2, 2, 1))
ROW, SLOT = 40, 32
COLUMNS = np.array([0, 3, 8, 9, 15])  # 0 and 8 are thread 0 of two blocks; the last has no column of B or C
B = np.random.default_rng(0).uniform(-1.0, 1.0, (4, len(COLUMNS))).astype(np.float32)

#: The registers that the code below names.
REGISTERS = EntryRegisters(b=2, c=4, descriptor=ENTRY.descriptor, peers=6, slot_bytes=0)

SCOREBOARD, FIRST = 5, 6

#: Instructions of both parts.
(
    LOAD, LOAD_NEXT, START, TEST, TIMES, STEP, STEP_BARRIER, OWN, OWN_BARRIER, EXPECT, SEND, SEND_NEXT, WAIT, AGAIN,
    COLLECT, COLLECT_NEXT, ADD, ADD_NEXT, STORE, STORE_NEXT, END,
) = range(21)  # fmt: skip

Rows = list[NDArray[np.void]]


def float_bits(value: int) -> int:
    return int(np.float32(value).view(np.uint32))


def part(number: int) -> Rows:
    """Of two, which compute C[i] = B[i] + B[3 - i]. Rows ``number`` and ``number`` + 2 are its own, of B and of C."""
    other, own = PEER_BYTES * (1 - number), PEER_BYTES * number
    return [
        row(Opcode.LDG, rd=8, ra=2, offset=ROW * number, write_barrier=0),
        row(Opcode.LDG, rd=10, ra=2, offset=ROW * (number + 2), write_barrier=0, stall=2),
        row(Opcode.CLUSTER_WAIT, wait=1),
        row(Opcode.LOP3_TEST, ra=0, immediate=0xFFFFFFFF, carry=FIRST),
        row(Opcode.FFMA_IMM, rd=0, ra=0, immediate=float_bits(2)),
        row(Opcode.IADD3, rd=12, ra=6, immediate=other),
        row(Opcode.IADD3, rd=13, ra=7, immediate=other),
        row(Opcode.IADD3, rd=6, ra=6, immediate=own),
        row(Opcode.IADD3, rd=7, ra=7, immediate=own, stall=12, yields=1),
        row(Opcode.EXPECT, ra=7, rb=0, predicate=FIRST, read_barrier=SCOREBOARD),
        row(Opcode.STAS, ra=12, rb=10, offset=BARRIER_BYTES, read_barrier=SCOREBOARD),
        row(Opcode.STAS, ra=12, rb=8, offset=BARRIER_BYTES + SLOT, read_barrier=SCOREBOARD, stall=2),
        row(Opcode.AWAIT, ra=7, carry=FIRST, write_barrier=SCOREBOARD, stall=2),
        row(Opcode.BRA, predicate=FIRST, predicate_negated=1, offset=-32, wait=1 << SCOREBOARD, stall=5),
        row(Opcode.LDS, rd=14, ra=6, offset=BARRIER_BYTES, write_barrier=1),
        row(Opcode.LDS, rd=15, ra=6, offset=BARRIER_BYTES + SLOT, write_barrier=1, stall=2),
        row(Opcode.FFMA_IMM, rd=16, ra=14, immediate=float_bits(1), rc=8, wait=0b10),
        row(Opcode.FFMA_IMM, rd=17, ra=15, immediate=float_bits(1), rc=10, stall=6),
        row(Opcode.STG, ra=4, rb=16, offset=ROW * number),
        row(Opcode.STG, ra=4, rb=17, offset=ROW * (number + 2)),
        row(Opcode.EXIT, stall=5),
    ]


def expected() -> NDArray[np.float32]:
    c = B[[0, 1, 2, 3]] + B[[3, 2, 1, 0]]
    c[:, -1] = np.nan
    return c


def code(*parts: Rows) -> MachineCode:
    return replace(code_of(*parts, registers=20), entry=REGISTERS, split_k=2)


def run(*parts: Rows) -> NDArray[np.float32]:
    return execute(code(*parts), Run(GEOMETRY, COLUMNS, B))


#: By instruction: the fields that change, or with ``op`` another instruction in its place.
Changes = dict[int, dict[str, int]]


def changed(number: int, changes: Changes) -> Rows:
    rows = part(number)
    for at, fields in changes.items():
        if "op" in fields:
            rows[at] = row(**{"stall": 6, **fields})
        for name, value in fields.items():
            rows[at][name] = value
    return rows


NOTHING = {"op": Opcode.NOP}
#: P0 in the thread of column 9, whose address ends in 36: the only one that carries.
CHOOSE = {"op": Opcode.IADD3, "ra": 2, "immediate": 2**32 - 36, "carry": 0}

#: The part that is changed and how, the tile and instruction that are refused, and why.
FAULTS: dict[str, tuple[int, Changes, tuple[int, int], str]] = {
    "a slot that nobody wrote": (1, {SEND_NEXT: NOTHING}, (0, WAIT), "waits for ever: 1 of 2 slots are written$"),
    "another slot": (
        0, {COLLECT: {"offset": BARRIER_BYTES + 7 * SLOT}}, (0, COLLECT), "reads slot 7, which nobody has written$",
    ),
    "a slot written twice": (
        0, {SEND_NEXT: {"offset": BARRIER_BYTES}}, (0, SEND_NEXT), "writes slot 0 of part 1 again",
    ),
    "a slot written by two parts": (
        1, {STEP: {"immediate": PEER_BYTES}, STEP_BARRIER: {"immediate": PEER_BYTES}},
        (1, SEND), "writes slot 0 of part 1 again",
    ),
    "the barrier of another": (0, {STEP_BARRIER: {"immediate": 0}}, (0, SEND), "of part 1 and tells another barrier"),
    "a receiver that may not have started": (
        0, {START: {"op": Opcode.NOP, "wait": 1}, EXPECT: NOTHING},
        (0, SEND), "stores before the CLUSTER_WAIT: the receiver may not have started",
    ),
    "a barrier that may not have been made": (
        0, {START: {"op": Opcode.NOP, "wait": 1}}, (0, EXPECT), "uses a barrier before the CLUSTER_WAIT: it may not",
    ),
    "a receiver that never starts": (
        1, {START: {"op": Opcode.EXIT}}, (1, START), "leaves while slot 0 may still be written: no AWAIT",
    ),
    "a receiver that has left": (
        0, {START: {"op": Opcode.EXIT}}, (1, SEND), "writes slot 0 of part 0, which may have left",
    ),
    "a receiver that does not wait": (
        1, {COLLECT: {"op": Opcode.EXIT}, WAIT: NOTHING, AGAIN: NOTHING},
        (1, COLLECT), "leaves while slot 0 may still be written: no AWAIT",
    ),
    "a reader too early": (1, {WAIT: NOTHING, AGAIN: NOTHING}, (1, COLLECT), "reads slot 0 before AWAIT"),
    "a reader too early for any writer": (
        0, {WAIT: NOTHING, AGAIN: NOTHING}, (0, COLLECT), "reads slot 0, which nobody has written",
    ),
    "an answer read early": (1, {AGAIN: {"wait": 0}}, (1, AGAIN), "reads P6, which a load fills: not waited for"),
    "bytes never told": (1, {EXPECT: NOTHING}, (1, WAIT), "waits at a barrier that was not told how many bytes come"),
    "bytes told twice": (
        1, {SEND: {"op": Opcode.EXPECT, "ra": 7, "rb": 0, "predicate": FIRST}}, (1, SEND), "tells its barrier twice",
    ),
    "bytes told by every thread": (1, {EXPECT: {"predicate": 7}}, (1, EXPECT), "not one thread of each block tells"),
    "bytes too few": (
        1, {TIMES: {"immediate": float_bits(1)}}, (1, EXPECT), "part 1 waits for 1 slots, and 2 are written",
    ),
    "bytes too few, before they come": (
        0, {TIMES: {"immediate": float_bits(1)}}, (1, SEND_NEXT), "part 0 waits for 1 slots, and 2 are written",
    ),
    "bytes too many": (0, {TIMES: {"immediate": float_bits(3)}}, (0, WAIT), "waits for ever: 2 of 3 slots are written"),
    "bytes of no slot": (
        1, {TIMES: {"op": Opcode.IADD3, "rd": 0, "ra": 0, "immediate": 4}},
        (1, EXPECT), "tells its barrier 36 bytes, where a slot has 32",
    ),
    "bytes told to another barrier": (1, {EXPECT: {"ra": 13}}, (1, EXPECT), "a barrier that is not the block's own"),
    "a wait at another barrier": (1, {WAIT: {"ra": 13}}, (1, WAIT), "a barrier that is not the block's own"),
    "a wait for another phase": (0, {WAIT: {"rb": 0}}, (0, WAIT), "waits for another phase than the first"),
    "the slot of another thread": (
        0, {COLLECT: {"offset": BARRIER_BYTES + 4}},
        (0, COLLECT), "byte 20 of the mailbox is not an element of column 0",
    ),
    "half an element": (
        1, {SEND: {"offset": BARRIER_BYTES + 2}}, (1, SEND), "byte 18 of the mailbox is not an element of column 0",
    ),
    "the barrier": (0, {COLLECT: {"offset": BARRIER_BYTES - SLOT}}, (0, COLLECT), "byte -16 of the mailbox is not"),
    "before all mailboxes": (1, {SEND: {"offset": -SLOT}}, (1, SEND), "byte -32 of the mailbox is not"),
    "behind shared memory": (0, {SEND: {"offset": SHARED_BYTES}}, (0, SEND), f"byte {PEER_BYTES + SHARED_BYTES} of"),
    "behind all mailboxes": (
        0, {STEP: {"immediate": 2 * PEER_BYTES}}, (0, SEND), f"byte {2 * PEER_BYTES + BARRIER_BYTES} of the mailbox is",
    ),
    "a store to C by the wrong instruction": (0, {SEND: {"ra": 4}}, (0, SEND), "of the mailbox is not an element of"),
    "a store to a mailbox by the wrong instruction": (0, {STORE: {"ra": 6}}, (0, STORE), "of C is not an element of"),
    "a load from another block": (
        1, {COLLECT: {"ra": 12}}, (1, COLLECT), "of the mailbox is not an element of column 0",
    ),
    "two slots at a time": (
        0, {COLLECT: {"rd": 16, "bytes": 8}}, (0, COLLECT), "8 bytes, where a slot has 4 for each thread",
    ),
    "a store to its own shared memory": (
        0, {ADD: {"op": Opcode.STS, "ra": 6, "rb": 8}}, (0, ADD), "a slot is written by STAS and read by LDS",
    ),
    "threads that send apart": (
        0, {LOAD: CHOOSE, SEND: {"predicate": 0, "rb": 10}}, (0, SEND), "threads of one warp go different ways",
    ),
    "threads that read different slots": (
        0, {TIMES: CHOOSE, EXPECT: {"op": Opcode.IADD3, "rd": 6, "ra": 6, "immediate": SLOT, "predicate": 0},
            WAIT: NOTHING, AGAIN: NOTHING},
        (0, COLLECT), "threads of one warp go to different slots",
    ),
    "an address overwritten": (
        0, {WAIT: {"op": Opcode.MOV_IMM, "rd": 12}},
        (0, WAIT), r"overwrites R12, which a load or store may not have read yet \(not waited for scoreboard 5\)",
    ),
    "a sum overwritten": (
        0, {WAIT: {"op": Opcode.MOV_IMM, "rd": 8}}, (0, WAIT), r"overwrites R8, .*not waited for scoreboard 5",
    ),
    "an address read early": (0, {OWN_BARRIER: {"stall": 5}}, (0, EXPECT), "reads R7 5 cycles after IADD3 wrote it"),
    "the first thread not known yet": (0, {OWN_BARRIER: {"stall": 7}}, (0, EXPECT), "reads P6 12 cycles after LOP3"),
    "what was collected read early": (0, {ADD: {"wait": 0}}, (0, ADD), "reads R14, .* not waited for scoreboard 1"),
    "no end": (1, {END: NOTHING}, (1, END), "goes on outside the tile"),
    "a loop between barriers": (
        0, {STORE: {"op": Opcode.BRA, "offset": -16}}, (0, STORE), "has not ended after 16 times its 21 instructions",
    ),
}  # fmt: skip


def test_two_parts_add_up_what_they_have() -> None:
    np.testing.assert_array_equal(run(part(0), part(1)), expected())


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_refused(name: str) -> None:
    number, changes, (tile, refused), why = FAULTS[name]
    parts = [part(0), part(1)]
    parts[number] = changed(number, changes)
    place = rf"^machine code: tile {tile}, instruction {refused + 21 * tile} \(at 0x\w+\), \S.*: .*{why}"
    with pytest.raises(VerificationFailed, match=place):
        run(*parts)


def test_tiles_do_not_share_mailboxes() -> None:
    """The same two parts again, in two more block rows and in other tiles: each writes its slots once."""
    once = code(part(0), part(1), part(0), part(1))
    for dispatch in ((0, 1, 0, 1), (0, 1, 2, 3), (2, 1, 0, 3)):
        np.testing.assert_array_equal(
            execute(replace(once, dispatch=dispatch), Run(GEOMETRY, COLUMNS, B)), expected(), strict=True
        )
    with pytest.raises(VerificationFailed, match="3 block rows are not tiles of 2 parts each"):
        execute(replace(once, dispatch=(0, 1, 2)), Run(GEOMETRY, COLUMNS, B))
    with pytest.raises(VerificationFailed, match="a block row runs tile 4 of 4"):
        execute(replace(once, dispatch=(0, 4)), Run(GEOMETRY, COLUMNS, B))


def test_each_part_has_registers_of_its_own() -> None:
    other = part(1)
    del other[0]
    with pytest.raises(VerificationFailed, match=r"tile 1, instruction 31 .*: reads R8, which nothing has written"):
        run(part(0), other)


@pytest.mark.parametrize("op", [Opcode.STAS, Opcode.EXPECT, Opcode.AWAIT, Opcode.LDS, Opcode.CLUSTER_WAIT])
def test_a_tile_that_no_blocks_share_has_no_shared_memory(op: Opcode) -> None:
    fields = {} if op == Opcode.CLUSTER_WAIT else {"ra": 2}
    alone = code_of([row(op, **fields), row(Opcode.EXIT, stall=5)], registers=18)
    assert alone.entry == ENTRY and alone.split_k == 1
    with pytest.raises(VerificationFailed, match=f"{op.name}: a tile is given no shared memory"):
        execute(alone, Run(GEOMETRY, COLUMNS, B))
