"""Text of machine code: nvdisasm's syntax, after a short form of the control fields.

    [B0-----:R-:W2:Y:S04] @!P0 FFMA R4, R5.reuse, 0.5, R4 ;

B: scoreboards waited for; R, W: scoreboards that fall when operands are read and results written; Y: yields; S:
stall.
"""

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.sass.fields import Generation, Row
from lospmm.codegen.sass.form import NO_BARRIER, PT, RZ

BYTES_PER_INSTRUCTION = 16

_REGISTERS = np.array([f"R{number}" for number in range(255)] + ["RZ"], object)
_REGISTERS_REUSED = np.concatenate([_REGISTERS, _REGISTERS + ".reuse"])
_UNIFORM = np.array([f"UR{number}" for number in range(63)] + ["URZ"], object)
_PREDICATES = np.array([f"P{number}" for number in range(7)] + ["PT"], object)

_SIZES = {2: ".U16", 4: "", 8: ".64", 16: ".128"}

#: From here on numbers are printed with an exponent and all their digits.
_LARGE = 1e9

#: (field, lowest bit, width) of the key that says everything in front of an instruction.
_PREFIX = (
    ("stall", 0, 4), ("yields", 4, 1), ("write_barrier", 5, 3), ("read_barrier", 8, 3), ("wait", 11, 6),
    ("predicate", 17, 3), ("predicate_negated", 20, 1),
)  # fmt: skip


def text(form: NDArray[np.void], generation: Generation) -> list[str]:
    """Return each instruction as nvdisasm prints it, without the semicolon, for code at address 0."""
    return [line.partition("] ")[2].removesuffix(" ;") for line in text_lines(form, generation)]


def text_lines(form: NDArray[np.void], generation: Generation) -> list[str]:
    """Return one line per instruction, control fields first, as shipped beside a cubin."""
    keys = np.zeros(len(form), np.uint32)
    for name, low, _ in _PREFIX:
        keys |= form[name].astype(np.uint32) << np.uint32(low)
    distinct, inverse = np.unique(keys, return_inverse=True)
    prefixes = np.array(list(map(_control, distinct.tolist())), object)[inverse]
    lines = np.empty(len(form), object)
    for op in np.flatnonzero(np.bincount(form["op"], minlength=1)).tolist():
        where = np.flatnonzero(form["op"] == op)
        row = generation.by_op[op]
        template, columns = _columns(row, form[where], where)
        lines[where] = list(map(f"%s{template} ;".__mod__, zip(prefixes[where].tolist(), *columns, strict=True)))
    return list(lines)


def _columns(row: Row, form: NDArray[np.void], numbers: NDArray[np.int64]) -> tuple[str, list[list[object]]]:
    """Return a template with a % format for each operand, and the operands, column by column."""
    columns: list[list[object]] = []

    def place(found: re.Match[str]) -> str:
        if found[1] == "float":
            shape, column = _floats(form)
        else:
            shape, column = "%s", _OPERANDS[found[1]](form, numbers)
        columns.append(column)
        return shape

    return re.sub(r"\{(\w+)\}", place, row.text), columns


def _floats(form: NDArray[np.void]) -> tuple[str, list[object]]:
    """Format float32 as nvdisasm does: 20 digits, exact enough to read the same number back."""
    values = np.ascontiguousarray(form["immediate"]).view(np.float32)
    if (np.abs(values) < _LARGE).all() and not (form["immediate"] == 1 << 31).any():
        return "%.20g", values.tolist()
    return "%s", [_float(bits, value) for bits, value in zip(form["immediate"].tolist(), values.tolist(), strict=True)]


def _float(bits: int, value: float) -> str:
    sign = "-" if bits >> 31 else "+"
    magnitude = bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return f"{sign}{'Q' if bits >> 22 & 1 else 'S'}NAN"
    if magnitude == 0x7F800000:
        return f"{sign}INF"
    if bits == 1 << 31:
        return "-0.0"
    return f"{value:.20e}" if abs(value) >= _LARGE else f"{value:.20g}"


def _register(name: str, reuse_bit: int | None = None) -> Callable[[NDArray[np.void], NDArray[np.int64]], list[object]]:
    def column(form: NDArray[np.void], _: NDArray[np.int64]) -> list[object]:
        if reuse_bit is None or not (reused := form["reuse"] >> reuse_bit & 1).any():
            return list(_REGISTERS[form[name]])
        return list(_REGISTERS_REUSED[form[name].astype(np.int64) | reused.astype(np.int64) << 8])

    return column


def _distance(offset: int) -> str:
    return "" if offset == 0 else f"+{_hex(offset)}"


def _hex(value: int) -> str:
    return f"-{-value:#x}" if value < 0 else f"{value:#x}"


def _pair(widened: Callable[[int], int]) -> Callable[[NDArray[np.void], NDArray[np.int64]], list[object]]:
    """Return the formatter of two 16-bit numbers, upper first; ``widened`` gives their float32 bits."""

    def one(bits: int) -> str:
        wide = widened(bits)
        return _float(wide, float(np.uint32(wide).view(np.float32)))

    def column(form: NDArray[np.void], _: NDArray[np.int64]) -> list[object]:
        return [f"{one(bits >> 16)}, {one(bits & 0xFFFF)}" for bits in form["immediate"].tolist()]

    return column


def _from_half(bits: int) -> int:
    if bits & 0x7C00 == 0x7C00:  # bit by bit: a float may change a NaN
        return (bits & 0x8000) << 16 | 0x7F800000 | (bits & 0x3FF) << 13
    return int(np.uint16(bits).view(np.float16).astype(np.float32).view(np.uint32))


def _shared(form: NDArray[np.void], _: NDArray[np.int64]) -> list[object]:
    return [
        _shared_address(ra, offset) for ra, offset in zip(form["ra"].tolist(), form["offset"].tolist(), strict=True)
    ]


def _shared_address(ra: int, offset: int) -> str:
    """Format a shared-memory address; without a register it has 24 unsigned bits."""
    return f"{offset & 0xFFFFFF:#x}" if ra == RZ and offset else f"{_REGISTERS[ra]}{_distance(offset)}"


def _barrier(form: NDArray[np.void], _: NDArray[np.int64]) -> list[object]:
    registers = ["" if ra == RZ else f"{_REGISTERS[ra]}+" for ra in form["ra"].tolist()]
    return [f"{ra}URZ{_distance(offset)}" for ra, offset in zip(registers, form["offset"].tolist(), strict=True)]


def _signed(form: NDArray[np.void], _: NDArray[np.int64]) -> list[object]:
    return [_hex(value) for value in form["immediate"].astype(np.int32).tolist()]


def _target(form: NDArray[np.void], numbers: NDArray[np.int64]) -> list[object]:
    return [_hex(value) for value in ((numbers + 1) * BYTES_PER_INSTRUCTION + form["offset"]).tolist()]


_OPERANDS: dict[str, Callable[[NDArray[np.void], NDArray[np.int64]], list[object]]] = {
    "rd": _register("rd"),
    "ra": _register("ra", 0),
    "rb": _register("rb", 1),
    "rc": _register("rc", 2),
    "ur": lambda form, _: list(_UNIFORM[form["ur"]]),
    "size": lambda form, _: [_SIZES[size] for size in form["bytes"].tolist()],
    "hex": lambda form, _: [f"{value:#x}" for value in form["immediate"].tolist()],
    "signed": _signed,
    "part": lambda form, _: [f"H{part}_H{part}" for part in form["immediate"].tolist()],
    "halves": _pair(_from_half),
    "bfloats": _pair(lambda bits: bits << 16),
    "offset": lambda form, _: [_distance(offset) for offset in form["offset"].tolist()],
    "shared": _shared,
    "barrier": _barrier,
    "target": _target,
    "predicate": lambda form, _: list(_PREDICATES[form["carry"]]),
    "carry": lambda form, _: ["" if carry == PT else f"P{carry}, " for carry in form["carry"].tolist()],
}


def _control(key: int) -> str:
    parts = {name: key >> low & (1 << width) - 1 for name, low, width in _PREFIX}
    waits = "".join(str(bit) if parts["wait"] >> bit & 1 else "-" for bit in range(6))
    read, write = ("-" if parts[name] == NO_BARRIER else str(parts[name]) for name in ("read_barrier", "write_barrier"))
    yields = "Y" if parts["yields"] else "-"
    guard = f"@{'!' * parts['predicate_negated']}{_PREDICATES[parts['predicate']]} "
    is_always = parts["predicate"] == PT and not parts["predicate_negated"]
    return f"[B{waits}:R{read}:W{write}:{yields}:S{parts['stall']:02}] {'' if is_always else guard}"
