"""Reader of the PTX that codegen/ptx.py emits.

It reads what ptxas has accepted, so that declarations and types of operands need no check here. ptx_machine.py has the
instructions; any other is refused.
"""

import re
from collections.abc import Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

#: What may have a predicate, beside exit.
GUARDED = frozenset(("ld.global.nc.L1::no_allocate.f32", "fma.rn.f32", "mov.f32"))

_FUNCTION = re.compile(
    r"^\.visible \.(?:func|entry) (?P<name>\w+) \((?P<parameters>[^)]*)\)(?:\s+\.maxntid (?P<threads>\d+))?[^{]*\{$"
    r"(?P<body>.*?)^\}$",
    re.DOTALL | re.MULTILINE,
)
_PARAMETER = re.compile(r"\.param \.[bu](32|64) (\w+)")
_STATEMENT = re.compile(r"(\s*)(?:(\w+):\s*)?([^;{}]*)[;{}]")
_OPERANDS = re.compile(r"\([^)]*\)|[^, ]+")
_ADDRESS = re.compile(r"\[(%\w+)(?:\+(-?\d+))?\]")

#: Statements of which nothing is kept: registers, and arguments of a call.
_DECLARATIONS = (".reg ", ".param ")


class PtxError(Exception):
    """An error in line ``line`` (from 1), or an instruction that cannot be executed."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


class Address(NamedTuple):
    """A register and an offset."""

    register: str
    offset: int  # bytes


#: A register or another name, an immediate, an address, or the arguments of a call.
Operand = str | np.float32 | np.uint32 | np.uint64 | Address | tuple[str, ...]


class PtxInstruction(NamedTuple):
    """A decoded instruction and its line."""

    opcode: str
    operands: tuple[Operand, ...]
    line: int
    guard: str = ""  # a predicate: threads in which it does not hold leave the instruction out
    is_negated: bool = False  # ... or those in which it holds


@dataclass(frozen=True, slots=True, eq=False)
class PtxFunction:
    """A function."""

    name: str
    line: int
    parameters: dict[str, str]  # name -> b32 or b64, in order
    max_threads: int | None
    body: list[PtxInstruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # label -> index into body
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)  # name of .branchtargets -> labels


def parse(text: str, opcodes: Set[str]) -> dict[str, PtxFunction]:
    """Return the functions of a whole emission by name. Raises PtxError for an instruction not among ``opcodes``."""
    functions, line, end = {}, 1, 0
    for found in _FUNCTION.finditer(text):
        line += text.count("\n", end, found.start())
        parameters = {name: f"b{bits}" for bits, name in _PARAMETER.findall(found["parameters"])}
        threads = None if found["threads"] is None else int(found["threads"])
        function = functions[found["name"]] = PtxFunction(found["name"], line, parameters, threads)
        line += text.count("\n", found.start(), found.start("body"))
        _read(function, found["body"], line, opcodes)
        line, end = line + found["body"].count("\n"), found.end()
    return functions


def _read(function: PtxFunction, body: str, line: int, opcodes: Set[str]) -> None:
    decoded: dict[tuple[str, bool], Operand] = {}  # by text and whether integers have 64 bits
    for space, label, statement in _STATEMENT.findall(body):
        line += space.count("\n")
        if statement.startswith(".branchtargets "):
            function.tables[label] = tuple(statement.removeprefix(".branchtargets ").split(", "))
        elif label:
            function.labels[label] = len(function.body)
        elif statement and not statement.startswith(_DECLARATIONS):
            function.body.append(_instruction(statement, line, opcodes, decoded))
        line += statement.count("\n")


def _instruction(text: str, line: int, opcodes: Set[str], decoded: dict[tuple[str, bool], Operand]) -> PtxInstruction:
    guard, _, rest = text.partition(" ") if text.startswith("@") else ("", "", text)
    opcode, _, operands = rest.partition(" ")
    if opcode not in opcodes:
        raise PtxError(line, f"unknown instruction {opcode!r}")
    predicate = guard.lstrip("@!")
    if guard and opcode == "exit":
        return PtxInstruction("@exit", (predicate,), line)
    if guard and opcode not in GUARDED:
        raise PtxError(line, f"{opcode} has no predicate here")
    found = []
    for operand in _OPERANDS.findall(operands):
        key = operand, opcode.endswith("64")
        if key not in decoded:
            decoded[key] = _decode(*key)
        found.append(decoded[key])
    return PtxInstruction(opcode, tuple(found), line, predicate, guard.startswith("@!"))


def _decode(text: str, is_wide: bool) -> Operand:
    if address := _ADDRESS.fullmatch(text):
        return Address(address[1], int(address[2] or 0))
    if text.startswith("("):
        return tuple(text[1:-1].split(", "))
    if text.startswith("0f"):
        return np.uint32(int(text[2:], 16)).view(np.float32)
    if text.lstrip("-").isdecimal():
        return np.uint64(int(text) % 2**64) if is_wide else np.uint32(int(text) % 2**32)
    return text.strip("[]")
