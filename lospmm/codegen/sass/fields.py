"""Bit fields of instructions as data: a ``Row`` says which bits are fixed and where fields lie.

Instructions have 128 bits, in two 64-bit words, low word first. ``encode`` and ``decode`` read the same rows, so an
instruction is added by its row alone (``generations``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.sass.form import FORM, NO_BARRIER, PT, RZ, Opcode, blank
from lospmm.errors import ToolchainFault

#: Bits of an instruction's opcode, form included.
OPCODE_BITS = 12

WORD_BITS = 64

#: Rows of FORM that are encoded at once: their columns stay in the core's cache.
_CHUNK = 1 << 15


@dataclass(frozen=True, slots=True)
class Bits:
    """Bits of an instruction that hold a field of FORM.

    ``places`` are (lowest bit, width), the value's low bits first; a place lies in one word. The value's lowest
    ``dropped`` bits are not stored; it is a multiple of ``step``. ``codes`` are (value, bits) if the instruction does
    not hold the value itself.
    """

    name: str
    places: tuple[tuple[int, int], ...]
    dropped: int = 0
    step: int = 1
    signed: bool = False
    codes: tuple[tuple[int, int], ...] = ()

    @property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest value that fits."""
        if self.codes:
            values = [value for value, _ in self.codes]
            return min(values), max(values)
        bits = sum(width for _, width in self.places) + self.dropped
        return (-(1 << bits - 1), (1 << bits - 1) - self.step) if self.signed else (0, (1 << bits) - self.step)

    def fits(self, values: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of the values the instruction can hold."""
        if self.codes:
            return np.isin(values, [value for value, _ in self.codes])
        smallest, largest = self.bounds
        fits: NDArray[np.bool_] = (values >= smallest) & (values <= largest) & (values % self.step == 0)
        return fits


@dataclass(frozen=True)
class Row:
    """One instruction of one generation: opcode, further fixed bits, operands, and nvdisasm's syntax.

    ``text`` names operands in braces (``listing``). ``pairs`` are the operands that hold an address in two registers,
    ``data`` the one that holds ``bytes`` of data: such registers are aligned.
    """

    op: Opcode
    opcode: int
    high: int  # the high word's bits that are always set, control fields left out
    operands: tuple[Bits, ...]
    text: str
    pairs: tuple[str, ...] = ()
    data: str = ""
    reuse: int = 0  # mask of the operands that the reuse cache can keep
    barriers: tuple[str, ...] = ("write_barrier", "read_barrier")  # those that it can signal
    guarded: bool = True  # whether a predicate may decide if it runs: of the uniform ones none is ever written here

    @cached_property
    def fields(self) -> tuple[Bits, ...]:
        """All fields of the instruction: operands, control fields, barriers and reuse."""
        reuse = tuple((mask, mask) for mask in range(8) if mask & ~self.reuse == 0)
        barriers = (
            Bits(name, places, codes=() if name in self.barriers else ((NO_BARRIER, NO_BARRIER),))
            for name, places in BARRIERS
        )
        control = (field if self.guarded else _UNGUARDED.get(field.name, field) for field in CONTROL)
        return (*self.operands, *control, *barriers, Bits("reuse", ((122, 4),), codes=reuse))

    @cached_property
    def fixed(self) -> tuple[int, int]:
        """Both words with zero in every field; fields are XORed in, since the bit of ``yields`` is inverted."""
        return self.opcode, self.high | 1 << _YIELD_BIT - WORD_BITS

    @cached_property
    def variable(self) -> tuple[int, int]:
        """Masks of the bits that belong to fields."""
        masks = [0, 0]
        for field in self.fields:
            for low, width in field.places:
                masks[low // WORD_BITS] |= ((1 << width) - 1) << low % WORD_BITS
        return masks[0], masks[1]

    @cached_property
    def unused(self) -> tuple[str, ...]:
        """Fields of FORM that this instruction does not have."""
        used = {"op", *(field.name for field in self.fields)}
        return tuple(name for name in FORM.names or () if name not in used)


_YIELD_BIT = 109

#: Control fields, which every instruction has.
CONTROL = (
    Bits("predicate", ((12, 3),)),
    Bits("predicate_negated", ((15, 1),)),
    Bits("stall", ((105, 4),)),
    Bits("yields", ((_YIELD_BIT, 1),)),
    Bits("wait", ((116, 6),)),
)
_UNGUARDED = {
    "predicate": Bits("predicate", ((12, 3),), codes=((PT, PT),)),
    "predicate_negated": Bits("predicate_negated", ((15, 1),), codes=((0, 0),)),
}
BARRIERS = (("write_barrier", ((110, 3),)), ("read_barrier", ((113, 3),)))


@dataclass(frozen=True)
class Generation:
    """The instructions of one compute capability."""

    arch: str  # "sm_90"
    rows: tuple[Row, ...]

    @cached_property
    def by_op(self) -> dict[int, Row]:
        """Rows by instruction."""
        return {row.op: row for row in self.rows}


def encode(form: NDArray[np.void], generation: Generation) -> NDArray[np.uint64]:
    """Return the machine code of ``form``: n x 2 words, low word first.

    Raises ToolchainFault naming the first row with an instruction that the generation does not have, a value that
    does not fit its field, a field that the instruction does not have, or an unaligned register.
    """
    words = np.empty((len(form), 2), np.uint64)
    numbers = np.arange(_CHUNK)
    for start in range(0, len(form), _CHUNK):
        chunk, out = form[start : start + _CHUNK], words[start : start + _CHUNK]
        bits = np.ascontiguousarray(chunk).view(np.uint64).reshape(len(chunk), -1)  # gathered faster than records
        for op in np.flatnonzero(np.bincount(chunk["op"])).tolist():
            where = np.flatnonzero(chunk["op"] == op)
            row = generation.by_op.get(op)
            if row is None:
                raise _fault(start + int(where[0]), f"opcode {op} is not an instruction of {generation.arch}")
            gathered = bits.take(where, axis=0).view(FORM)[:, 0]
            out[where, 0], out[where, 1] = _encode_row(gathered, row, start + numbers[where])
    return words


def decode(words: NDArray[np.uint64], generation: Generation) -> NDArray[np.void]:
    """Return the form of n x 2 words. Raises ToolchainFault with the offset of the first unknown one."""
    form = blank(len(words))
    known = np.zeros(len(words), np.bool_)
    opcodes = words[:, 0] & ((1 << OPCODE_BITS) - 1)
    for row in generation.rows:
        where = np.flatnonzero(opcodes == row.opcode)
        rest = words[where] ^ np.array(row.fixed, np.uint64)
        same = ((rest & ~np.array(row.variable, np.uint64)) == 0).all(axis=1)
        if not same.any():
            continue
        decoded, valid = _decode_row(rest[same], row)
        where = where[same][valid]
        form[where] = decoded[valid]
        known[where] = True
    if not known.all():
        index = int(np.argmin(known))
        low, high = words[index].tolist()
        raise ToolchainFault(
            f"machine code at {index * 16:#x}: {low:#018x} {high:#018x} is none of the instructions of "
            f"{generation.arch} that this back end writes"
        )
    return form


def _encode_row(form: NDArray[np.void], row: Row, numbers: NDArray[np.int64]) -> list[NDArray[np.uint64]]:
    """Return both words of rows of one instruction; ``numbers`` are their places in the program."""
    fixed = list(row.fixed)
    varying: list[tuple[Bits, NDArray[np.int64]]] = []
    for name in row.unused:
        if (form[name] != _BLANK[name]).any():
            bad = int(np.argmax(form[name] != _BLANK[name]))
            raise _fault(int(numbers[bad]), f"{row.op.name} has no {name}, which is {form[name][bad]}")
    for field in row.fields:
        column = form[field.name]
        smallest, largest = int(column.min()), int(column.max())
        values = column[:1].astype(np.int64) if smallest == largest else column.astype(np.int64)
        _check(field, values, (smallest, largest), row, numbers)
        if smallest != largest:
            varying.append((field, values))
            continue
        for word, place, bits in _placed(field, values):  # the same in every instruction: set once
            fixed[word] ^= int(bits[0]) << place
    _check_alignment(form, row, numbers)
    _check_control(form, row, numbers)
    words = [np.full(len(form), fixed[0], np.uint64), np.full(len(form), fixed[1], np.uint64)]
    for field, values in varying:
        for word, place, bits in _placed(field, values):
            bits <<= np.uint64(place)
            words[word] ^= bits
    return words


def _placed(field: Bits, values: NDArray[np.int64]) -> Iterator[tuple[int, int, NDArray[np.uint64]]]:
    """Yield (word, lowest bit in it, bits to place there) for each of the field's places."""
    if field.codes:
        table = np.zeros(max(value for value, _ in field.codes) + 1, np.int64)
        for value, bits in field.codes:
            table[value] = bits
        values = table[values]
    taken = field.dropped
    for low, width in field.places:
        part = (values >> taken) & ((1 << width) - 1)
        yield low // WORD_BITS, low % WORD_BITS, part.view(np.uint64)
        taken += width


def _decode_row(rest: NDArray[np.uint64], row: Row) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
    """Return the form of words without their fixed bits, and which of them hold only valid codes."""
    form = blank(len(rest))
    form["op"] = row.op
    valid = np.ones(len(rest), np.bool_)
    for field in row.fields:
        values = np.zeros(len(rest), np.int64)
        taken = field.dropped
        for low, width in field.places:
            part = (rest[:, low // WORD_BITS] >> np.uint64(low % WORD_BITS)) & np.uint64((1 << width) - 1)
            values |= part.astype(np.int64) << min(taken, WORD_BITS - 1)
            taken += width
        if field.signed:
            values = (values ^ (1 << taken - 1)) - (1 << taken - 1)
        if field.codes:
            table = np.full(1 << taken, -1)
            for value, bits in field.codes:
                table[bits] = value
            values = table[values]
        form[field.name] = values
        valid &= (form[field.name] == values) & (values % field.step == 0)
    return form, valid & _legal(form)


def _check(
    field: Bits, values: NDArray[np.int64], bounds: tuple[int, int], row: Row, numbers: NDArray[np.int64]
) -> None:
    smallest, largest = field.bounds
    if smallest <= bounds[0] and bounds[1] <= largest and not field.codes and field.step == 1:
        return
    fits = field.fits(values)
    if not fits.all():
        bad = int(np.argmin(fits))
        allowed = ", ".join(str(value) for value, _ in field.codes) or f"{smallest} to {largest}"
        if field.step > 1:
            allowed += f" in steps of {field.step}"
        raise _fault(int(numbers[bad]), f"{row.op.name} {field.name} is {values[bad]}, not {allowed}")


def _check_alignment(form: NDArray[np.void], row: Row, numbers: NDArray[np.int64]) -> None:
    """Check that registers accessed together begin at a multiple of their number; R255 is exempt."""
    counts: list[tuple[str, int | NDArray[np.integer]]] = [(name, 2) for name in row.pairs]
    if row.data:
        counts.append((row.data, np.maximum(form["bytes"] >> 2, 1)))
    for name, count in counts:
        column = form[name]
        bad = (column & (count - 1) != 0) & (column != RZ)
        if bad.any():
            first = int(np.argmax(bad))
            raise _fault(
                int(numbers[first]), f"{row.op.name} {name} is R{column[first]}, not the first of an aligned group"
            )


def _legal(form: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return which rows combine stall, yields and reuse legally: nvdisasm rejects any other."""
    stall, yields, reuse = (form[name] for name in ("stall", "yields", "reuse"))
    return np.where(yields == 0, (stall >= 1) & (stall <= 11), reuse == 0)


def _check_control(form: NDArray[np.void], row: Row, numbers: NDArray[np.int64]) -> None:
    legal = _legal(form)
    if not legal.all():
        bad = int(np.argmin(legal))
        stall, yields, reuse = (form[name][bad] for name in ("stall", "yields", "reuse"))
        raise _fault(int(numbers[bad]), f"{row.op.name} cannot have stall {stall}, yields {yields} and reuse {reuse}")


def _fault(number: int, what: str) -> ToolchainFault:
    return ToolchainFault(f"instruction {number} (at {number * 16:#x}): {what}")


_BLANK = blank(1)[0]
