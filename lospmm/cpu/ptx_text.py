"""Parser of the PTX that codegen/ptx.py emits; anything else is refused.

An operand is decoded by what its instruction expects there: a destination (``f32=``), a register (``f32``), an
immediate (``f32#``) or either of them (``f32?``). ptx_machine.py has the instructions.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

#: What may have a predicate, beside exit.
GUARDED = frozenset(("ld.global.nc.L1::no_allocate.f32", "fma.rn.f32", "mov.f32"))

SPECIAL_REGISTERS = ("%tid.x", "%ntid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x")

_HEADER = re.compile(r"\s*\.version \d+\.\d+\n\.target sm_\w+\n\.address_size 64\n")
_FUNCTION = re.compile(
    r"\.visible \.(?:func (?P<tile>\w+) \((?P<tile_parameters>[^)]*)\) \.noreturn"
    r"|entry (?P<entry>\w+) \((?P<entry_parameters>[^)]*)\)(?:\s+\.maxntid (?P<threads>\d+))?)"
)
_PARAMETER = re.compile(r"\.param \.[bu](32|64) (\w+)")
_REGISTERS = re.compile(r"(%\w+)(?:<(\d+)>)?")
_LABEL = re.compile(r"(\w+):\s*")
_ADDRESS = re.compile(r"\[(%\w+)(?:\+(-?\d+))?\]")
_STATEMENT = re.compile(r"(\s*)([^;{}]*)([;{}]?)")

#: The widths of the registers that hold no floats.
_BITS = {"b32": 32, "b64": 64}


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
    """A function; what follows its header is filled in as it is read."""

    name: str
    line: int
    parameters: Mapping[str, str]  # name -> b32 or b64, in order
    max_threads: int | None
    declared: dict[str, str]  # register -> its type
    body: list[PtxInstruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # label -> index into body
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)  # name of .branchtargets -> labels


def parse(text: str, kinds: Mapping[str, tuple[str, ...]]) -> dict[str, PtxFunction]:
    """Return the functions of a whole emission by name, given the kinds of operands by opcode. Raises PtxError."""
    header = _HEADER.match(text)
    if header is None:
        raise PtxError(1, "expected .version, .target and .address_size 64")
    reader = _Reader(kinds, line=1 + header.group().count("\n"))
    for space, statement, end in _STATEMENT.findall(re.sub(r"//[^\n]*", "", text[header.end() :])):
        reader.line += space.count("\n")
        if statement or end:
            reader.read(statement.rstrip(), end)
        reader.line += statement.count("\n")
    if reader.function is not None:
        raise PtxError(reader.line, f"{reader.function.name} has no end")
    return reader.functions


class _Reader:
    """The state of the parser: outside of functions, in one, or in the braces around a call."""

    def __init__(self, kinds: Mapping[str, tuple[str, ...]], line: int) -> None:
        self.kinds, self.line = kinds, line
        self.functions: dict[str, PtxFunction] = {}
        self.function: PtxFunction | None = None
        self.arguments: dict[str, str] | None = None  # declared for a call, while in its braces
        self.decoded: dict[tuple[str, str], Operand] = {}  # (kind, text) that this function had before

    def read(self, text: str, end: str) -> None:
        """Read one statement and what ends it: a semicolon, a brace, or nothing at the end of the text."""
        function = self.function
        if function is None:
            self.function = self._begin(text, end)
            return
        if (label := _LABEL.match(text)) is not None:
            text = text[label.end() :]
            if text.startswith(".branchtargets "):
                function.tables[label[1]] = tuple(text.removeprefix(".branchtargets ").split(", "))
                return
            function.labels[label[1]] = len(function.body)
        if text and end == ";":
            self._statement(function, text)
        elif text:
            raise PtxError(self.line, f"expected ; and not {end or 'the end'} after {text!r}")
        elif end == "{" and self.arguments is None:
            self.arguments = {}
        elif end == "}" and self.arguments is not None:
            self.arguments = None
            self.decoded.clear()  # the arguments are not known behind the call
        elif end == "}":
            self.functions[function.name] = function
            self.function = None
            self.decoded.clear()
        else:
            raise PtxError(self.line, f"unexpected {end!r}")

    def _begin(self, text: str, end: str) -> PtxFunction:
        header = _FUNCTION.fullmatch(text)
        if header is None or end != "{":
            raise PtxError(self.line, f"expected a function and not {text[:80]!r}")
        name = header["tile"] or header["entry"]
        if name in self.functions:
            raise PtxError(self.line, f"{name} is there twice")
        parameters = {}
        for declaration in re.split(r",\s*", header["tile_parameters"] or header["entry_parameters"]):
            parameter = _PARAMETER.fullmatch(declaration)
            if parameter is None:
                raise PtxError(self.line, f"expected a parameter and not {declaration!r}")
            parameters[parameter[2]] = f"b{parameter[1]}"
        threads = None if header["threads"] is None else int(header["threads"])
        return PtxFunction(name, self.line, parameters, threads, dict.fromkeys(SPECIAL_REGISTERS, "special"))

    def _statement(self, function: PtxFunction, text: str) -> None:
        opcode, _, rest = text.partition(" ")
        if opcode == ".reg":
            self._declare_registers(function, rest)
        elif opcode == ".param":
            parameter = _PARAMETER.fullmatch(text)
            if parameter is None or self.arguments is None:
                raise PtxError(self.line, f"unexpected {text!r}")
            self.arguments[parameter[2]] = f"b{parameter[1]}"
        elif opcode.startswith("@"):
            if rest == "exit":
                self._instruction(function, "@exit", opcode[1:])
                return
            self._instruction(function, *_opcode(rest))
            self._guard(function, opcode[1:])
        else:
            self._instruction(function, opcode, rest)

    def _guard(self, function: PtxFunction, text: str) -> None:
        """Set the predicate of the instruction that was read last."""
        instruction, name = function.body[-1], text.removeprefix("!")
        if instruction.opcode not in GUARDED:
            raise PtxError(self.line, f"{instruction.opcode} has no predicate here")
        if function.declared.get(name) != "pred":
            raise PtxError(self.line, f"{name!r} is not declared, or not of the kind pred")
        function.body[-1] = instruction._replace(guard=name, is_negated=text.startswith("!"))

    def _declare_registers(self, function: PtxFunction, text: str) -> None:
        kind, _, names = text.partition(" ")
        if kind not in (".b32", ".b64", ".f32", ".pred"):
            raise PtxError(self.line, f"registers of type {kind!r}")
        for name in names.split(", "):
            declaration = _REGISTERS.fullmatch(name)
            if declaration is None:
                raise PtxError(self.line, f"expected a register and not {name!r}")
            stem, count = declaration.groups()
            declared = [stem] if count is None else [f"{stem}{index}" for index in range(int(count))]
            function.declared.update(dict.fromkeys(declared, kind[1:]))

    def _instruction(self, function: PtxFunction, opcode: str, rest: str) -> None:
        kinds = self.kinds.get(opcode)
        if kinds is None:
            raise PtxError(self.line, f"unknown instruction {opcode!r}")
        texts = rest.split(", ", len(kinds) - 1) if rest else []
        if len(texts) != len(kinds):
            raise PtxError(self.line, f"{opcode} has {len(kinds)} operands, not {len(texts)}")
        operands = []
        for key in zip(kinds, texts, strict=True):
            operand = self.decoded.get(key)
            if operand is None:
                operand = _decode(function, self.arguments or {}, *key)
                if operand is None:
                    raise PtxError(self.line, f"{key[1]!r} is not declared, or not of the kind {key[0]}")
                self.decoded[key] = operand
            operands.append(operand)
        function.body.append(PtxInstruction(opcode, tuple(operands), self.line))


def _opcode(text: str) -> tuple[str, str]:
    opcode, _, rest = text.partition(" ")
    return opcode, rest


def _decode(function: PtxFunction, arguments: Mapping[str, str], kind: str, text: str) -> Operand | None:
    """Return the operand that ``text`` names if it is of the expected ``kind``, else None."""
    match kind:
        case "address":
            return _address(function, text)
        case "parameter b32" | "parameter b64":
            return _in_brackets(text, function.parameters, kind)
        case "argument b32" | "argument b64":
            return _in_brackets(text, arguments, kind)
        case "name":
            return text if re.fullmatch(r"\w+", text) else None
        case "names":
            return tuple(text[1:-1].split(", ")) if re.fullmatch(r"\(\w+(, \w+)*\)", text) else None
        case _:
            return _register_or_immediate(function, kind, text)


def _in_brackets(text: str, declared: Mapping[str, str], kind: str) -> str | None:
    """Return the name of a parameter or argument of the type that ``kind`` ends with."""
    name = text.removeprefix("[").removesuffix("]")
    return name if text == f"[{name}]" and declared.get(name) == kind.rpartition(" ")[2] else None


def _register_or_immediate(function: PtxFunction, kind: str, text: str) -> Operand | None:
    wanted, rule = kind.rstrip("=#?"), kind[-1]
    if text.startswith("%"):
        declared = function.declared.get(text)
        readable = declared == wanted or (declared == "special" and kind == "b32?")
        return text if readable and rule != "#" else None
    if rule not in "#?":
        return None
    if wanted == "f32":
        bits = re.fullmatch(r"0f([0-9A-F]{8})", text)
        return None if bits is None else np.uint32(int(bits[1], 16)).view(np.float32)
    if wanted not in _BITS or not re.fullmatch(r"-?\d+", text):
        return None
    value, bits_wide = int(text), _BITS[wanted]
    if not -(1 << bits_wide - 1) <= value < 1 << bits_wide:
        return None
    return np.uint32(value % 2**32) if bits_wide == 32 else np.uint64(value % 2**64)


def _address(function: PtxFunction, text: str) -> Address | None:
    """Return a register with an offset, which PTX takes as a signed 32-bit number of bytes."""
    parts = _ADDRESS.fullmatch(text)
    if parts is None or function.declared.get(parts[1]) != "b64":
        return None
    offset = int(parts[2] or 0)
    return Address(parts[1], offset) if -(1 << 31) <= offset < 1 << 31 else None
