"""Hazards in machine code that the hardware does not check: reads too early and overwrites too early.

One warp issues its instructions in order, on a clock that only their stalls advance, by at least one cycle each.

- Arithmetic reads its operands when it is issued; its result can be read ``LATENCY`` cycles later, not before.
- A load's result is there at an unknown time: not before an instruction has waited for the load's scoreboard.
- Loads and stores read addresses and data at an unknown time: only after an instruction has waited for one of their
  scoreboards is it certain that they did.
- A scoreboard counts up to ``SCOREBOARD_LIMIT``; it is up ``SCOREBOARD_CYCLES`` after its instruction was issued.
- Of two results in one register the later instruction's must arrive later.

A program in which ``Hazards.issue`` finds nothing computes the same as in sequential order, whatever the memory
latency. Instructions skipped by a predicate count as executed, so guards hide no hazard and may be refused for one
that they avert.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.sass import half, narrow
from lospmm.codegen.sass.fetch import LEPC_LATENCY
from lospmm.codegen.sass.form import NO_BARRIER, PT, RZ, Instruction, Opcode
from lospmm.codegen.sass.generations import generation_of

#: From a test of bits to an instruction that its predicate guards, as ptxas 13.0 sets them.
PREDICATE_CYCLES = 13

_FMA = (4, 5)
_INTEGER = (6, 6)
_ROUNDINGS = (Opcode.F2FP_F16, Opcode.F2FP_BF16)
_CONVERSIONS = (Opcode.HADD2_F32, Opcode.SHF_L, Opcode.PRMT, *_ROUNDINGS)

#: Cycles from an instruction's issue until arithmetic, and until a load or store, may read its result. A multiply-add
#: after a multiply-add: 4, measured (Jia et al., 2018, chapter 4, and again on an H200). ptxas 13.0 sets 5 before a
#: load or store reads a result, and 4 to 5 after integers; 6 leaves room for what was not measured.
LATENCY: Mapping[int, tuple[int, int]] = MappingProxyType(
    {
        Opcode.FFMA_IMM: _FMA,
        Opcode.FADD_IMM: _FMA,
        Opcode.FMNMX_NAN: _INTEGER,
        **dict.fromkeys(half.PRODUCTS.values(), (half.LATENCY, half.LATENCY)),
        **dict.fromkeys(_CONVERSIONS, (narrow.WIDEN_LATENCY, narrow.WIDEN_LATENCY)),
        Opcode.LOP3_TEST: (PREDICATE_CYCLES, PREDICATE_CYCLES),
        Opcode.LEPC: (LEPC_LATENCY, LEPC_LATENCY),
        **dict.fromkeys((Opcode.MOV_IMM, Opcode.IADD3, Opcode.IADD3_X), _INTEGER),
    }
)

#: Instructions of unknown latency: those with a result, and all.
LOADS = frozenset((Opcode.LDG, Opcode.LDS, Opcode.AWAIT))
MEMORY = LOADS | {Opcode.STG, Opcode.STS, Opcode.STAS, Opcode.EXPECT, Opcode.TOUCH}

#: Instructions with the latency rule of loads and stores: ptxas 13.0 leaves 5 cycles from multiply-add to rounding.
_READ_LATE = MEMORY | {*_ROUNDINGS}

SCOREBOARDS = 6
SCOREBOARD_LIMIT = 63  # 6 bits
SCOREBOARD_CYCLES = 2  # as ptxas sets them: a load, a stall of 2, an instruction that waits for it

#: Registers that the hardware keeps of those that a thread is given.
HARDWARE_REGISTERS = 2


class Hazard(Exception):
    """The reason why an instruction is not reliable."""


def instructions(form: NDArray[np.void]) -> list[Instruction]:
    """Return the rows of ``form`` as values."""
    return [Instruction._make(row) for row in form.tolist()]


class _LoadInFlight(NamedTuple):
    """A load in flight: its place in the order of issue, and its scoreboard."""

    number: int
    scoreboard: int


def _operands(fields: tuple[str, ...]) -> Mapping[int, tuple[tuple[str, int], ...]]:
    """Return those registers of each instruction among ``fields``: a field, and 1, 2 or, for data, 0."""
    return {
        row.op: tuple(
            (bits.name, 0 if bits.name == row.data else 1 + (bits.name in row.pairs))
            for bits in row.operands
            if bits.name in fields and not bits.codes  # those hold RZ
        )
        for row in generation_of("sm_90").rows
    }


_READS = _operands(("ra", "rb", "rc"))
_WRITES = _operands(("rd",))

#: Predicates stand behind the registers: P0 is 256.
_P0 = 256
_NAMES = [*(f"R{number}" for number in range(_P0)), *(f"P{number}" for number in range(PT))]

_NEVER = 1 << 62
_REUSABLE = ("ra", "rb", "rc")


@dataclass(slots=True, eq=False)
class Hazards:
    """The state of a warp's instructions in flight.

    Threads have ``registers`` registers; those of ``filled`` hold values at the start.
    """

    registers: int
    filled: Iterable[int]
    clock: int = 0
    _number: int = 0  # of the instruction at hand, in the order of issue
    _readable: list[int] = field(default_factory=lambda: [_NEVER] * len(_NAMES))  # by arithmetic: cycle
    _readable_by_memory: list[int] = field(default_factory=lambda: [_NEVER] * len(_NAMES))
    _writers: list[int] = field(default_factory=lambda: [0] * len(_NAMES))  # opcode of what wrote last
    _loads: list[_LoadInFlight | None] = field(default_factory=lambda: [None] * len(_NAMES))
    # By register: of the loads and stores that read it, the last with each pair of scoreboards.
    _readers: list[dict[tuple[int, int], int]] = field(default_factory=lambda: [{} for _ in _NAMES])
    # By scoreboard; what has none is never waited for.
    _waited: list[int] = field(default_factory=lambda: [-1] * (NO_BARRIER + 1))  # number of the last that waited
    _raised: list[int] = field(default_factory=lambda: [0] * (NO_BARRIER + 1))  # cycle from which it can be waited for
    _outstanding: list[int] = field(default_factory=lambda: [0] * (NO_BARRIER + 1))

    def __post_init__(self) -> None:
        for register in self.filled:
            self._readable[register] = self._readable_by_memory[register] = 0

    def issue(self, instruction: Instruction) -> None:
        """Issue the next instruction of the warp. Raises Hazard."""
        op = instruction.op
        if instruction.wait:
            self._wait(instruction.wait)
        reads, writes = list(_reads(instruction)), list(_writes(instruction))
        self._check_reads(reads, self._readable_by_memory if op in _READ_LATE else self._readable)
        if instruction.predicate != PT:
            self._check_reads([_P0 + instruction.predicate], self._readable)
        self._check_writes(op, writes)
        if instruction.reuse:
            _check_reuse(instruction, writes)
        if op in LOADS:
            for register in writes:
                self._loads[register] = _LoadInFlight(self._number, instruction.write_barrier)
        elif writes:
            self._write(op, writes)
        if op in MEMORY:
            scoreboards = instruction.read_barrier, instruction.write_barrier
            for register in reads:
                self._readers[register][scoreboards] = self._number
        for scoreboard in (instruction.read_barrier, instruction.write_barrier):
            if scoreboard != NO_BARRIER:
                self._raise(scoreboard)
        self.clock += max(1, instruction.stall)
        self._number += 1

    def _wait(self, mask: int) -> None:
        for scoreboard in range(SCOREBOARDS):
            if mask >> scoreboard & 1:
                if self.clock < self._raised[scoreboard]:
                    late = SCOREBOARD_CYCLES - (self._raised[scoreboard] - self.clock)
                    raise Hazard(
                        f"waits for scoreboard {scoreboard} {_cycles(late)} after it was set, "
                        f"{SCOREBOARD_CYCLES} are needed"
                    )
                self._waited[scoreboard], self._outstanding[scoreboard] = self._number, 0

    def _raise(self, scoreboard: int) -> None:
        self._outstanding[scoreboard] += 1
        if self._outstanding[scoreboard] > SCOREBOARD_LIMIT:
            raise Hazard(f"{SCOREBOARD_LIMIT} are outstanding on scoreboard {scoreboard}, which cannot count more")
        self._raised[scoreboard] = self.clock + SCOREBOARD_CYCLES

    def _in_flight(self, load: _LoadInFlight) -> bool:
        return self._waited[load.scoreboard] <= load.number

    def _check_reads(self, reads: list[int], readable: list[int]) -> None:
        for register in reads:
            if register < _P0:
                self._check_given(register)
            load = self._loads[register]
            if load is not None:
                if self._in_flight(load):
                    raise Hazard(f"reads {_NAMES[register]}, {_pending(load)}")
            elif self.clock < readable[register]:
                raise Hazard(f"reads {_NAMES[register]}{self._too_early(register, readable)}")

    def _too_early(self, register: int, readable: list[int]) -> str:
        if readable[register] == _NEVER:
            return ", which nothing has written"
        writer = Opcode(self._writers[register])
        latency = LATENCY[writer][readable is self._readable_by_memory]
        since = latency - (readable[register] - self.clock)
        return f" {_cycles(since)} after {writer.name} wrote it, {latency} are needed"

    def _check_writes(self, op: int, writes: list[int]) -> None:
        lands = self.clock + (LATENCY[op][0] if op in LATENCY else 1)  # a load may be as fast as arithmetic
        for register in writes:
            if register < _P0:
                self._check_given(register)
            name, load, before = _NAMES[register], self._loads[register], self._readable[register]
            if load is not None and self._in_flight(load):
                raise Hazard(f"overwrites {name}, {_pending(load)}")
            if load is None and before != _NEVER and lands <= before:
                raise Hazard(f"overwrites {name}, which {Opcode(self._writers[register]).name} may write later")
            for scoreboards, number in self._readers[register].items():
                if all(self._waited[scoreboard] <= number for scoreboard in scoreboards):
                    raise Hazard(
                        f"overwrites {name}, which a load or store may not have read yet ({_unwaited(scoreboards)})"
                    )
            self._readers[register].clear()

    def _write(self, op: int, writes: list[int]) -> None:
        arithmetic, memory = LATENCY[op]
        for register in writes:
            self._loads[register], self._writers[register] = None, op
            self._readable[register] = self.clock + arithmetic
            self._readable_by_memory[register] = self.clock + memory

    def _check_given(self, register: int) -> None:
        if register >= self.registers - HARDWARE_REGISTERS:
            raise Hazard(
                f"R{register} is not among the {self.registers} registers that a thread is given: "
                f"the last {HARDWARE_REGISTERS} are the hardware's"
            )


def _reads(instruction: Instruction) -> Iterator[int]:
    yield from _registers(instruction, _READS[instruction.op])
    if instruction.op == Opcode.IADD3_X and instruction.carry != PT:
        yield _P0 + instruction.carry


def _writes(instruction: Instruction) -> Iterator[int]:
    yield from _registers(instruction, _WRITES[instruction.op])
    if instruction.op in (Opcode.IADD3, Opcode.LOP3_TEST, Opcode.AWAIT) and instruction.carry != PT:
        yield _P0 + instruction.carry


def _registers(instruction: Instruction, operands: tuple[tuple[str, int], ...]) -> Iterator[int]:
    for name, count in operands:
        first = getattr(instruction, name)
        if first != RZ:
            yield from range(first, first + (count or max(1, instruction.bytes // 4)))


def _check_reuse(instruction: Instruction, writes: list[int]) -> None:
    for bit, name in enumerate(_REUSABLE):
        if instruction.reuse >> bit & 1 and getattr(instruction, name) in writes:
            raise Hazard(f"keeps R{getattr(instruction, name)} in the reuse cache and overwrites it")


def _pending(load: _LoadInFlight) -> str:
    if load.scoreboard == NO_BARRIER:
        return "which a load without a scoreboard fills at an unknown time"
    return f"which a load fills: not waited for scoreboard {load.scoreboard}"


def _unwaited(scoreboards: tuple[int, int]) -> str:
    named = " or ".join(str(scoreboard) for scoreboard in sorted({*scoreboards} - {NO_BARRIER}))
    return f"not waited for scoreboard {named}" if named else "it has no scoreboard"


def _cycles(count: int) -> str:
    return f"{count} cycle" if count == 1 else f"{count} cycles"
