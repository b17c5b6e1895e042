"""Parts of a tile in machine code: what they send each other, and that each way to lose it is refused."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from lospmm.codegen.sass.form import Opcode
from lospmm.codegen.sass.machine import ENTRY, PEER_BYTES, EntryRegisters, MachineCode
from lospmm.cpu.cluster import SHARED_BYTES
from lospmm.cpu.geometry import Geometry
from lospmm.cpu.hazards import ARRIVE_CYCLES
from lospmm.cpu.sass_machine import execute
from lospmm.errors import VerificationFailed
from tests.cpu.drawn_machine_code import GLOBAL, code_of, row

#: B and C of four rows and 10 columns, 8 threads a block: 40 bytes a row of B, 32 a slot.
GEOMETRY = Geometry(m=4, k=4, n=10, cols=8, block_rows=2, grid=(2, 2, 1))
ROW, SLOT = 40, 32
COLUMNS = np.array([0, 3, 8, 9, 15])  # 0 and 8 are thread 0 of two blocks; the last has no column of B or C
B = np.random.default_rng(0).uniform(-1.0, 1.0, (4, len(COLUMNS))).astype(np.float32)

#: The registers that the code below names.
REGISTERS = EntryRegisters(b=2, c=4, descriptor=ENTRY.descriptor, peers=6, mailbox=0)

ONE, SCOREBOARD = 0x3F800000, 5

#: Instructions of both parts.
LOAD, START, STEP, SEND, SEND_NEXT, FENCE, ERRORS, MORE_ERRORS, ARRIVE, WAIT, COLLECT, COLLECT_NEXT, STORE = (
    0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15,
)  # fmt: skip

Rows = list[NDArray[np.void]]


def part(number: int) -> Rows:
    """Of two, which compute C[i] = B[i] + B[3 - i]. Rows ``number`` and ``number`` + 2 are its own, of B and of C."""
    return [
        row(Opcode.LDG, rd=8, ra=2, offset=ROW * number, write_barrier=0),
        row(Opcode.LDG, rd=10, ra=2, offset=ROW * (number + 2), write_barrier=0, stall=2),
        row(Opcode.CLUSTER_WAIT, wait=1),
        row(Opcode.IADD3, rd=6, ra=6, immediate=PEER_BYTES * (1 - number), stall=6),
        row(Opcode.ST, ra=6, rb=10, read_barrier=SCOREBOARD),
        row(Opcode.ST, ra=6, rb=8, offset=SLOT, read_barrier=SCOREBOARD, stall=2),
        row(Opcode.MEMBAR),
        row(Opcode.ERRBAR),
        row(Opcode.CGAERRBAR),
        row(Opcode.CLUSTER_ARRIVE, stall=ARRIVE_CYCLES),
        row(Opcode.CLUSTER_WAIT),
        row(Opcode.LDS, rd=11, ra=0, write_barrier=1),
        row(Opcode.LDS, rd=12, ra=0, offset=SLOT, write_barrier=1, stall=2),
        row(Opcode.FFMA_IMM, rd=14, ra=11, immediate=ONE, rc=8, wait=0b10),
        row(Opcode.FFMA_IMM, rd=15, ra=12, immediate=ONE, rc=10, stall=6),
        row(Opcode.STG, ra=4, rb=14, offset=ROW * number),
        row(Opcode.STG, ra=4, rb=15, offset=ROW * (number + 2)),
        row(Opcode.EXIT, stall=5),
    ]


def expected() -> NDArray[np.float32]:
    c = B[[0, 1, 2, 3]] + B[[3, 2, 1, 0]]
    c[:, -1] = np.nan
    return c


def code(*parts: Rows) -> MachineCode:
    return replace(code_of(*parts, registers=18), entry=REGISTERS, split_k=2)


def run(*parts: Rows) -> NDArray[np.float32]:
    return execute(code(*parts), GEOMETRY, COLUMNS, B)


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
    "a slot that nobody wrote": (1, {SEND_NEXT: NOTHING}, (0, COLLECT_NEXT), "reads slot 1, which nobody has written$"),
    "another slot": (0, {COLLECT: {"offset": 7 * SLOT}}, (0, COLLECT), "reads slot 7, which nobody has written$"),
    "a slot written twice": (
        0, {SEND_NEXT: {"offset": 0}}, (0, SEND_NEXT), "writes slot 0 of part 1 again, part 0 has written it",
    ),
    "a slot written by two parts": (
        1, {STEP: {"immediate": PEER_BYTES}}, (1, SEND), "writes slot 0 of part 1 again, part 0 has written it",
    ),
    "a receiver that may not have started": (
        0, {START: {"op": Opcode.NOP, "wait": 1}, ARRIVE: NOTHING},
        (0, SEND), "stores before the first CLUSTER_WAIT: the receiver may not have started",
    ),
    "a receiver that never starts": (
        1, {START: {"op": Opcode.EXIT}}, (1, START), "leaves while part 0 may still write slot 0: no CLUSTER_WAIT here",
    ),
    "a receiver that has left": (
        0, {START: {"op": Opcode.EXIT}}, (1, SEND), "writes slot 0 of part 0, which may have left",
    ),
    "a receiver that does not wait": (
        1, {COLLECT: {"op": Opcode.EXIT}, WAIT: NOTHING},
        (1, COLLECT), "leaves while part 0 may still write slot 0: no CLUSTER_WAIT here has followed its",
    ),
    "no fence": (
        1, {FENCE: NOTHING}, (0, COLLECT), "reads slot 0, which part 1 has written: no MEMBAR has followed",
    ),
    "a fence too early": (
        1, {SEND_NEXT: {"op": Opcode.MEMBAR}, FENCE: {"op": Opcode.ST, "ra": 6, "rb": 8, "offset": SLOT}},
        (0, COLLECT_NEXT), "reads slot 1, which part 1 has written: no MEMBAR has followed",
    ),
    "a fence too late": (
        1, {FENCE: {"op": Opcode.CLUSTER_ARRIVE, "stall": ARRIVE_CYCLES}, ARRIVE: {"op": Opcode.MEMBAR}},
        (0, COLLECT), "reads slot 0, which part 1 has written: no CLUSTER_ARRIVE has followed its MEMBAR",
    ),
    "a reader too early for any writer": (0, {WAIT: NOTHING}, (0, COLLECT), "reads slot 0, which nobody has written$"),
    "a reader too early": (
        1, {WAIT: NOTHING}, (1, COLLECT), "which part 0 has written: no CLUSTER_WAIT here has followed its",
    ),
    "a deadlock": (1, {ARRIVE: NOTHING}, (1, WAIT), "waits without a CLUSTER_ARRIVE before: for itself, and so"),
    "a deadlock at the start": (
        0, {ERRORS: {"op": Opcode.CLUSTER_WAIT}}, (0, ERRORS), "waits without a CLUSTER_ARRIVE before",
    ),
    "two arrivals in a phase": (
        1, {ERRORS: {"op": Opcode.CLUSTER_ARRIVE}}, (1, ARRIVE), "arrives again without a CLUSTER_WAIT between",
    ),
    "an arrival in the prologue's phase": (
        0, {LOAD: {"op": Opcode.CLUSTER_ARRIVE}}, (0, LOAD), "arrives again without a CLUSTER_WAIT between",
    ),
    "the slot of another thread": (
        0, {COLLECT: {"offset": 4}}, (0, COLLECT), "byte 4 of the mailbox is not an element of column 0",
    ),
    "half an element": (1, {SEND: {"offset": 2}}, (1, SEND), "byte 2 of the mailbox is not an element of column 0"),
    "before the mailbox": (0, {COLLECT: {"offset": -SLOT}}, (0, COLLECT), "byte -32 of the mailbox is not"),
    "before all mailboxes": (1, {SEND: {"offset": -SLOT}}, (1, SEND), "byte -32 of the mailbox is not"),
    "the last slot that a block can have": (
        0, {COLLECT: {"offset": SHARED_BYTES - SLOT}}, (0, COLLECT), "reads slot 7263, which nobody has written",
    ),
    "behind shared memory": (0, {SEND: {"offset": SHARED_BYTES}}, (0, SEND), f"byte {PEER_BYTES + SHARED_BYTES} of"),
    "behind all mailboxes": (
        0, {STEP: {"immediate": 2 * PEER_BYTES}}, (0, SEND), f"byte {2 * PEER_BYTES} of the mailbox is not an element",
    ),
    "a store to C by the wrong instruction": (0, {SEND: {"ra": 4}}, (0, SEND), "of the mailbox is not an element of"),
    "a store to a mailbox by the wrong instruction": (0, {STORE: {"ra": 6}}, (0, STORE), "of C is not an element of"),
    "a load by a generic address": (1, {COLLECT: {"ra": 6}}, (1, COLLECT), "of the mailbox is not an element of"),
    "a load from another block": (
        1, {ERRORS: {"op": Opcode.IADD3, "rd": 9, "ra": 0, "immediate": 2**32 - PEER_BYTES}, COLLECT: {"ra": 9}},
        (1, COLLECT), f"byte {-PEER_BYTES} of the mailbox is not an element of column 0",
    ),
    "two slots at a time": (
        0, {COLLECT: {"rd": 14, "bytes": 8}}, (0, COLLECT), "8 bytes, where a slot has 4 for each thread",
    ),
    "a store to its own shared memory": (
        0, {ERRORS: {"op": Opcode.STS, "ra": 0, "rb": 8}}, (0, ERRORS), "a slot is written by ST and read by LDS",
    ),
    "threads that send apart": (
        0, {LOAD: CHOOSE, SEND: {"predicate": 0, "rb": 10}}, (0, SEND), "threads of one warp go different ways",
    ),
    "threads that fence apart": (
        0, {ERRORS: CHOOSE, MORE_ERRORS: {"op": Opcode.MEMBAR, "predicate": 0}}, (0, MORE_ERRORS),
        "threads of one warp go different ways",
    ),
    "threads that read different slots": (
        0, {ERRORS: CHOOSE, MORE_ERRORS: {"op": Opcode.IADD3, "rd": 0, "ra": 0, "immediate": SLOT, "predicate": 0}},
        (0, COLLECT), "threads of one warp go to different slots",
    ),
    "an address overwritten": (
        0, {FENCE: {"op": Opcode.IADD3, "rd": 6, "ra": 6, "immediate": PEER_BYTES}},
        (0, FENCE), r"overwrites R6, which a load or store may not have read yet \(not waited for scoreboard 5\)",
    ),
    "a sum overwritten": (
        0, {FENCE: {"op": Opcode.MOV_IMM, "rd": 8}}, (0, FENCE), r"overwrites R8, .*not waited for scoreboard 5",
    ),
    "an address read early": (0, {STEP: {"stall": 5}}, (0, SEND), "reads R6 5 cycles after IADD3 wrote it"),
    "what was collected read early": (0, {13: {"wait": 0}}, (0, 13), "reads R11, .* not waited for scoreboard 1"),
    "another descriptor": (1, {SEND: {"ur": 8}}, (1, SEND), "UR8 does not hold the descriptor"),
    "no end": (1, {17: NOTHING}, (1, 17), "goes on outside the tile"),
    "a loop between barriers": (
        0, {STORE: {"op": Opcode.BRA, "offset": -16}}, (0, STORE), "has not ended after 16 times its 18 instructions",
    ),
}  # fmt: skip


def test_two_parts_add_up_what_they_have() -> None:
    np.testing.assert_array_equal(run(part(0), part(1)), expected())


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_refused(name: str) -> None:
    number, changes, (tile, refused), why = FAULTS[name]
    parts = [part(0), part(1)]
    parts[number] = changed(number, changes)
    place = rf"^machine code: tile {tile}, instruction {refused + 18 * tile} \(at 0x\w+\), \S.*: .*{why}"
    with pytest.raises(VerificationFailed, match=place):
        run(*parts)


def test_an_address_is_stepped_on_once_it_was_read() -> None:
    """To the next block: the repair of a fault above, which leaves the rest without a fence."""
    rows = part(0)
    rows.insert(FENCE, row(Opcode.IADD3, rd=6, ra=6, immediate=PEER_BYTES, wait=1 << SCOREBOARD, stall=6))
    np.testing.assert_array_equal(run(rows, part(1)), expected())


def test_who_has_left_counts_as_arrived() -> None:
    """A part that writes zeros meets the other once; that one meets it twice."""
    zeros = [row(Opcode.CLUSTER_WAIT), row(Opcode.STG, ra=4, offset=ROW), row(Opcode.EXIT, stall=5)]
    twice = [
        *(row(op, stall=ARRIVE_CYCLES) for op in (Opcode.CLUSTER_WAIT, Opcode.CLUSTER_ARRIVE, Opcode.CLUSTER_WAIT)),
        row(Opcode.STG, ra=4),
        row(Opcode.EXIT, stall=5),
    ]
    for parts in ((zeros, twice), (twice, zeros)):
        c = run(*parts)
        assert (c[:2, :-1] == 0).all()
        assert np.isnan(c[2:]).all() and np.isnan(c[:, -1]).all()


def test_tiles_do_not_share_mailboxes() -> None:
    """The same two parts again, in two more block rows and in other tiles: each writes its slots once."""
    once = code(part(0), part(1), part(0), part(1))
    for dispatch in ((0, 1, 0, 1), (0, 1, 2, 3), (2, 1, 0, 3)):
        np.testing.assert_array_equal(
            execute(replace(once, dispatch=dispatch), GEOMETRY, COLUMNS, B), expected(), strict=True
        )
    with pytest.raises(VerificationFailed, match="3 block rows are not tiles of 2 parts each"):
        execute(replace(once, dispatch=(0, 1, 2)), GEOMETRY, COLUMNS, B)
    with pytest.raises(VerificationFailed, match="a block row runs tile 4 of 4"):
        execute(replace(once, dispatch=(0, 4)), GEOMETRY, COLUMNS, B)


def test_each_part_has_registers_of_its_own() -> None:
    other = part(1)
    del other[0]
    with pytest.raises(VerificationFailed, match=r"tile 1, instruction 22 .*: reads R8, which nothing has written"):
        run(part(0), other)


@pytest.mark.parametrize("op", [Opcode.ST, Opcode.LDS, Opcode.CLUSTER_ARRIVE, Opcode.CLUSTER_WAIT])
def test_a_tile_that_no_blocks_share_has_no_shared_memory(op: Opcode) -> None:
    fields = {"ra": 2} if op in (*GLOBAL, Opcode.LDS) else {}
    alone = code_of([row(op, **fields), row(Opcode.EXIT, stall=5)], registers=18)
    assert alone.entry == ENTRY and alone.split_k == 1
    with pytest.raises(VerificationFailed, match=f"{op.name}: a tile is given no shared memory"):
        execute(alone, GEOMETRY, COLUMNS, B)
