"""Machine code by hand and by Hypothesis, and control fields under which any of it runs as it is written."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from lospmm.codegen.sass.form import NO_BARRIER, PT, RZ, Opcode, blank
from lospmm.codegen.sass.machine import ENTRY, MachineCode

#: The registers of drawn programs, all filled at their start, with P0 (256).
FIRST, COUNT = 8, 4
P0 = 256
FILLED = (*range(FIRST, FIRST + COUNT), P0)

ARITHMETIC = (
    Opcode.FFMA_IMM, Opcode.MOV_IMM, Opcode.IADD3, Opcode.IADD3_X, Opcode.FADD_IMM, Opcode.FMNMX_NAN, Opcode.HADD2_F32,
    Opcode.SHF_L, Opcode.F2FP_F16, Opcode.F2FP_BF16, Opcode.PRMT,
)  # fmt: skip
LOADS = (Opcode.LDG, Opcode.LDS)
STORES = (Opcode.STG, Opcode.STS, Opcode.STAS)
GLOBAL = (Opcode.LDG, Opcode.STG, Opcode.TOUCH)  # with a descriptor
PAIRED = (*GLOBAL, Opcode.STAS)  # with a pair of registers for an address

#: A stall after which any result of arithmetic is there and any scoreboard is up.
SAFE_STALL = 6


def row(op: int, **fields: int) -> NDArray[np.void]:
    """One instruction, with the descriptor and four bytes where it needs them."""
    form = blank(1)
    form["op"] = op
    if op in GLOBAL:
        form["ur"] = ENTRY.descriptor
    if op in (*LOADS, *STORES):
        form["bytes"] = 4
    for name, value in fields.items():
        form[name] = value
    return form


def code_of(*tiles: list[NDArray[np.void]], registers: int = 40) -> MachineCode:
    """Tiles of hand-written rows, each run by a block row of its own."""
    lengths = [len(rows) for rows in tiles]
    return MachineCode(
        form=np.concatenate([one for rows in tiles for one in rows]),
        starts=np.cumsum([0, *lengths[:-1]]),
        dispatch=tuple(range(len(tiles))),
        registers=registers,
        entry=ENTRY,
    )


class Step(NamedTuple):
    """An instruction with what it reads and writes, told apart from ``lospmm.cpu.hazards``."""

    form: NDArray[np.void]  # one row
    reads: tuple[int, ...]
    writes: tuple[int, ...]

    @property
    def op(self) -> int:
        return int(self.form["op"][0])


def _span(first: int, count: int = 1) -> tuple[int, ...]:
    return () if first == RZ else tuple(range(first, first + count))


def step_of(form: NDArray[np.void]) -> Step:
    """A row of a kernel as ``lospmm.codegen.sass.scheduler`` writes them."""
    rd, ra, rb, rc = (int(form[name][0]) for name in ("rd", "ra", "rb", "rc"))
    reads, writes = {
        Opcode.FFMA_IMM: (_span(ra) + _span(rc), _span(rd)),
        Opcode.LDG: (_span(ra, 2), _span(rd)),
        Opcode.STG: (_span(ra, 2) + _span(rb), ()),
        Opcode.STAS: (_span(ra, 2) + _span(rb), ()),
        Opcode.LDS: (_span(ra), _span(rd)),
        Opcode.IADD3: (_span(ra), _span(rd)),
        Opcode.MOV_IMM: ((), _span(rd)),
        Opcode.FADD_IMM: (_span(ra), _span(rd)),
        Opcode.HADD2_F32: (_span(rb), _span(rd)),
        Opcode.SHF_L: (_span(ra), _span(rd)),
        Opcode.PRMT: (_span(ra), _span(rd)),
        **dict.fromkeys(_OF_TWO, (_span(ra) + _span(rb), _span(rd))),
    }.get(Opcode(int(form["op"][0])), ((), ()))
    return Step(form, reads, writes)


_OF_TWO = (Opcode.FMNMX_NAN, Opcode.F2FP_F16, Opcode.F2FP_BF16)

#: Of what does not take any: which half, how many bits, and the digits of which bytes.
_IMMEDIATES = {
    Opcode.HADD2_F32: st.integers(0, 1),
    Opcode.SHF_L: st.integers(0, 31),
    Opcode.PRMT: st.tuples(*[st.integers(0, 7)] * 4).map(lambda digits: int("".join(map(str, digits)), 16)),
}

_single = st.sampled_from([*range(FIRST, FIRST + COUNT)] * 3 + [RZ])
_even = st.integers(FIRST // 2, (FIRST + COUNT) // 2 - 1).map(lambda half: 2 * half)


@st.composite
def steps(draw: st.DrawFn, ops: Sequence[Opcode]) -> Step:
    op = draw(st.sampled_from(ops))
    if op in (*LOADS, *STORES):
        words = draw(st.sampled_from([1, 2]))
        data = draw(_single if words == 1 else _even)
        address = draw(_even if op in PAIRED else _single)
        read = _span(address, 2 if op in PAIRED else 1)
        if op in LOADS:
            return Step(row(op, rd=data, ra=address, bytes=4 * words), read, _span(data, words))
        return Step(row(op, rb=data, ra=address, bytes=4 * words), read + _span(data, words), ())
    names = {
        Opcode.FFMA_IMM: ("ra", "rc"),
        Opcode.MOV_IMM: (),
        Opcode.IADD3: ("ra", "rc"),
        Opcode.IADD3_X: ("ra", "rc"),
        Opcode.FADD_IMM: ("ra",),
        Opcode.HADD2_F32: ("rb",),
        Opcode.SHF_L: ("ra",),
        Opcode.PRMT: ("ra",),
        **dict.fromkeys(_OF_TWO, ("ra", "rb")),
    }[op]
    rd, operands = draw(_single), {name: draw(_single) for name in names}
    fields = {"rd": rd, **operands}
    reads, writes = tuple(one for operand in operands.values() for one in _span(operand)), _span(rd)
    if op not in (Opcode.HADD2_F32, *_OF_TWO):
        fields["immediate"] = draw(st.integers(0, 2**32 - 1))
    if op in _IMMEDIATES:
        fields["immediate"] = draw(_IMMEDIATES[op])
    if op in (Opcode.IADD3, Opcode.IADD3_X):
        fields["carry"] = draw(st.sampled_from([0, PT]))
        carry = (P0,) if fields["carry"] != PT else ()
        reads, writes = (reads, writes + carry) if op == Opcode.IADD3 else (reads + carry, writes)
    return Step(row(op, **fields), reads, writes)


@st.composite
def programs(draw: st.DrawFn, ops: Sequence[Opcode] = (*ARITHMETIC, *LOADS, *LOADS, *STORES)) -> list[Step]:
    """A few instructions that wait for all that they need: each safe, with its control fields set."""
    program = draw(st.lists(steps(ops), min_size=3, max_size=10))
    in_flight: list[tuple[Step, int, int]] = []  # with read and write scoreboard
    for step in program:
        wait = 0
        for other, reader, writer in in_flight:
            if {*step.reads, *step.writes} & {*other.writes}:
                wait |= 1 << writer
            elif {*step.writes} & {*other.reads}:
                wait |= 1 << draw(st.sampled_from([one for one in (reader, writer) if one != NO_BARRIER]))
        in_flight = [one for one in in_flight if not wait >> one[2 if one[0].op in LOADS else 1] & 1]
        form = step.form
        form["wait"], form["stall"] = wait, SAFE_STALL
        if step.op in (*LOADS, *STORES):
            form["read_barrier"] = draw(st.integers(0, 5))
            form["write_barrier"] = draw(st.integers(0, 5)) if step.op in LOADS else NO_BARRIER
            in_flight.append((step, int(form["read_barrier"][0]), int(form["write_barrier"][0])))
    return program
