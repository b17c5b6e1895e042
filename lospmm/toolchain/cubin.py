"""Cubins of our own machine code: ptxas's prologue with the tiles appended, and the reverse.

``graft`` rewrites what a cubin says of its code: the section of the kernel, the jump table (one 32-bit offset per
block row), the symbol's size, and the attributes of ``.nv.info`` that list registers, exits and jump targets. The
names EIATTR are those that ``cuobjdump -elf`` prints. None of this is documented; it was read off ptxas 13.0's
output, and the result runs (tests/on_gpu).
"""

import math
import struct
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.sass.fields import decode, encode
from lospmm.codegen.sass.form import NO_BARRIER, RZ, Opcode
from lospmm.codegen.sass.generations import generation_of
from lospmm.codegen.sass.machine import HARDWARE_REGISTERS, EntryRegisters, MachineCode
from lospmm.codegen.sass.prologue import SHOWN_BYTES, TARGETS
from lospmm.errors import ToolchainFault
from lospmm.problem.dtype import FLOAT_BYTES
from lospmm.toolchain import elf

INSTRUCTION_BYTES = 16

#: A tile starts where a line of the instruction caches does.
LINE_BYTES = 128

_EIATTR_EXIT_OFFSETS = 0x1C
_EIATTR_INDIRECT_BRANCHES = 0x34
_EIATTR_CTA_PER_CLUSTER = 0x3D

#: Instructions of each of the prologue's targets, in any order, EXIT last; as many more if there is a residual, and a
#: store for each other register or pair that it shows.
_TARGET = (Opcode.LDG, Opcode.STG)
_SHOWN_ALONE = 4  # at most

_EXIT_BITS = 0x94D

_KERNEL = "a kernel of this emitter"


def graft(prologue: bytes, code: MachineCode, kernel: str) -> bytes:
    """Return the cubin of ``kernel``: the prologue that ptxas compiled, with ``code`` appended.

    Raises ToolchainFault if the prologue does not have the expected form.
    """
    with elf.known_as(_KERNEL, prologue):
        sections = elf.sections(prologue)
        parts = {section.name: section.content for section in sections}
        text, info = _part(parts, f".text.{kernel}"), _part(parts, f".nv.info.{kernel}")
        form, named = _renamed(code, _entry(text, info, code.arch))
        words = encode(form, generation_of(code.arch))
        head = text + bytes(-len(text) % LINE_BYTES)
        offsets = len(head) + code.starts * INSTRUCTION_BYTES
        body = words.astype("<u8").tobytes()
        grown = head + body
        grown += bytes(-len(grown) % LINE_BYTES)
        table = np.array([offsets[tile] for tile in code.dispatch], "<u4").tobytes()
        registers = max(named, elf.kernel_usage(prologue, kernel).registers)  # a small tile needs fewer than it
        exits = len(head) + INSTRUCTION_BYTES * np.flatnonzero(code.form["op"] == Opcode.EXIT)
        return elf.rewrite(
            prologue,
            {
                f".text.{kernel}": grown,
                f".nv.constant2.{kernel}": table,
                f".nv.info.{kernel}": _edited(
                    info,
                    {
                        _EIATTR_EXIT_OFFSETS: lambda value: value + exits.astype("<u4").tobytes(),
                        _EIATTR_INDIRECT_BRANCHES: lambda value: value[:8] + struct.pack("<I", len(table) // 4) + table,
                    },
                ),
                ".nv.info": _edited(
                    _part(parts, ".nv.info"),
                    {elf.EIATTR_REGCOUNT: lambda value: value[:4] + struct.pack("<I", registers)},
                ),
                ".symtab": elf.symbol_set(sections, kernel, 0, len(grown)),
                ".debug_frame": _frame_set(parts, len(grown)),
            },
        )


def machine_code(cubin: bytes, kernel: str, arch: str) -> MachineCode:
    """Return the tiles in a cubin that ``graft`` made. Raises ToolchainFault for any other."""
    with elf.known_as(_KERNEL, cubin):
        parts = {section.name: section.content for section in elf.sections(cubin)}
        text, info = _part(parts, f".text.{kernel}"), _part(parts, f".nv.info.{kernel}")
        table = np.frombuffer(_part(parts, f".nv.constant2.{kernel}"), "<u4").astype(np.int64)
        starts, dispatch = np.unique(table, return_inverse=True)
        if not len(starts) or starts[0] % LINE_BYTES or starts[-1] >= len(text):
            raise ToolchainFault(f"the jump table of {kernel} leads out of its code")
        words = np.frombuffer(text, "<u8").reshape(-1, 2)[starts[0] // INSTRUCTION_BYTES :]
        padding = (words == 0).all(axis=1)  # after the last tile
        form = decode(words[: len(words) - int(np.argmin(padding[::-1]))].astype(np.uint64), generation_of(arch))
        entry = _entry(text, info, arch)
        return MachineCode(
            form=form,
            starts=(starts - starts[0]) // INSTRUCTION_BYTES,
            dispatch=tuple(dispatch.tolist()),
            registers=elf.kernel_usage(cubin, kernel).registers,
            entry=entry,
            arch=arch,
            split_k=_split_k(info),
        )


def _split_k(info: bytes) -> int:
    """Return the blocks of a cluster, which share a tile."""
    sizes = next((value for _, kind, value in elf.attributes(info) if kind == _EIATTR_CTA_PER_CLUSTER), None)
    return 1 if sizes is None else math.prod(struct.unpack("<III", sizes))


def _part(parts: dict[str, bytes], name: str) -> bytes:
    if name not in parts:
        raise ToolchainFault(f"the cubin has no section {name}")
    return parts[name]


def _entry(text: bytes, info: bytes, arch: str) -> EntryRegisters:
    """Return the registers of the prologue's addresses: those that its two targets load and store through."""
    branch = next((value for _, kind, value in elf.attributes(info) if kind == _EIATTR_INDIRECT_BRANCHES), b"")
    if len(branch) < 4:
        raise ToolchainFault("the prologue does not jump")
    (jump,) = struct.unpack_from("<I", branch)
    start = jump // INSTRUCTION_BYTES + 1
    words = np.frombuffer(text, "<u8").reshape(-1, 2)[start:].astype(np.uint64)
    exits = np.flatnonzero(words[:, 0] & 0xFFF == _EXIT_BITS)
    length = int(exits[0]) + 1 if len(exits) else 0
    form = decode(words[: TARGETS * length], generation_of(arch)).reshape(TARGETS, -1)
    found = [sorted(target["op"].tolist()) for target in form]
    if found[0] not in _KNOWN_TARGETS or found.count(found[0]) != TARGETS:
        names = ", ".join(op.name for op in (*_TARGET, Opcode.EXIT))
        raise ToolchainFault(f"the prologue's targets are not {names}, as this emitter needs")
    entries = {_entry_of_target(target, number) for number, target in enumerate(form)}
    if len(entries) != 1:
        raise ToolchainFault("the prologue's targets find their addresses in different registers")
    for target in form:
        raised = 0  # scoreboards of the target's own
        for instruction in target:
            if int(instruction["wait"]) & ~raised:
                raise ToolchainFault("the prologue's targets wait for its addresses, which no tile does")
            raised |= sum(1 << int(instruction[name]) for name in _BARRIERS if instruction[name] != NO_BARRIER)
    return entries.pop()


_BARRIERS = ("write_barrier", "read_barrier")


#: The possible instructions of a target, sorted.
_KNOWN_TARGETS = [
    sorted(int(op) for op in (*_TARGET, *residual, *[Opcode.STG] * alone, Opcode.EXIT))
    for residual in ((), _TARGET)
    for alone in range(_SHOWN_ALONE + 1)
]


def _entry_of_target(target: NDArray[np.void], number: int) -> EntryRegisters:
    """Return a target's registers, told apart by the offset of each store from C."""
    by_op: dict[int, list[np.void]] = {}
    for instruction in target:
        by_op.setdefault(int(instruction["op"]), []).append(instruction)
    stores = {int(store["offset"]) - int(store["bytes"]) * number: store for store in by_op[Opcode.STG]}
    if len({int(store["ra"]) for store in stores.values()}) != 1 or not stores.keys() <= {0, *SHOWN_BYTES.values()}:
        raise ToolchainFault("the prologue's targets store elsewhere than this emitter tells them")
    third = stores.get(SHOWN_BYTES["residual"])
    loads = {int(load["rd"]): load for load in by_op[Opcode.LDG]}
    if len(loads) != len(by_op[Opcode.LDG]) or (third is not None and int(third["rb"]) not in loads):
        raise ToolchainFault("the prologue's targets load what they do not store")
    residual = None if third is None else int(loads.pop(int(third["rb"]))["ra"])
    (load,) = loads.values()
    shown = {name: int(stores[at]["rb"]) for name, at in SHOWN_BYTES.items() if at in stores}
    return EntryRegisters(
        int(load["ra"]), int(by_op[Opcode.STG][0]["ra"]), int(load["ur"]), **{**shown, "residual": residual}
    )


def _renamed(code: MachineCode, entry: EntryRegisters) -> tuple[NDArray[np.void], int]:
    """Return the tiles with the registers that this prologue fills, and the registers of a thread.

    Registers in their place move: an address keeps two registers, aligned, and any other register stays if it can.
    """
    if entry == code.entry:
        return code.form, code.registers
    names = np.full(RZ + 1, _UNNAMED)
    names[RZ] = RZ
    for field, width in _ENTRY_REGISTERS.items():
        ours, theirs = getattr(code.entry, field), getattr(entry, field)
        if (ours is None) != (theirs is None):
            raise ToolchainFault(f"the prologue has {'no' if theirs is None else 'a'} register for {field}")
        for half in range(width if ours is not None else 0):
            names[ours + half] = theirs + half
    form = code.form.copy()
    in_memory = np.isin(form["op"], (Opcode.LDG, Opcode.STG, Opcode.STAS, Opcode.TOUCH))
    pairs, single = np.unique(form["ra"][in_memory]), np.unique([form[operand] for operand in _OPERANDS])
    for first, width in [*_shared_data(form), *((pair, 2) for pair in pairs.tolist())]:
        if (names[first : first + width] == _UNNAMED).all():
            names[first : first + width] = _free(names, first, width) + np.arange(width)
    for register in single[names[single] == _UNNAMED].tolist():
        names[register] = _free(names, register, 1)
    for operand in _OPERANDS:
        form[operand] = names[form[operand]]
    form["ur"][form["ur"] == code.entry.descriptor] = entry.descriptor
    highest = int(names[names < RZ].max())
    return form, max(code.registers, highest + 1 + HARDWARE_REGISTERS)


_ENTRY_REGISTERS = {"b": 2, "c": 2, "peers": 2, "residual": 2, "slot_bytes": 1, "padded": 1, "kept": 1, "fetched": 1}
_OPERANDS = ("rd", "ra", "rb", "rc")
_UNNAMED = RZ + 1


def _shared_data(form: NDArray[np.void]) -> list[tuple[int, int]]:
    """Return the register groups of shared loads and stores, widest first: first register and count."""
    data = [form[operand][form["op"] == op] for op, operand in ((Opcode.LDS, "rd"), (Opcode.STS, "rb"))]
    words = [form["bytes"][form["op"] == op] // FLOAT_BYTES for op in (Opcode.LDS, Opcode.STS)]
    found = {*zip(np.concatenate(data).tolist(), np.concatenate(words).tolist(), strict=True)}
    return sorted(((first, width) for first, width in found if width > 1), key=lambda one: -one[1])


def _free(names: NDArray[np.int64], wish: int, width: int) -> int:
    """Return the first of ``width`` free, aligned registers: those wished for, or the lowest."""
    taken = {*names.tolist()}
    first: int
    for first in (wish, *range(0, RZ - 1, width)):
        if not taken & {*range(first, first + width)}:
            return first
    raise ToolchainFault("the tiles have no registers left beside those of the prologue")


def _edited(info: bytes, edits: Mapping[int, Callable[[bytes], bytes]]) -> bytes:
    """Return ``info`` with the values of these attributes changed."""
    out = b""
    for form, kind, value in elf.attributes(info):
        out += bytes((form, kind))
        if form == elf.EIFMT_SVAL:
            new = edits[kind](value) if kind in edits else value
            out += struct.pack("<H", len(new)) + new
        else:
            out += value
    return out


def _frame_set(parts: dict[str, bytes], size: int) -> bytes:
    """Return the debug frame with the new code length, which follows the relocated address."""
    frame = bytearray(parts.get(".debug_frame", b""))
    relocated = parts.get(".rela.debug_frame", b"")
    if relocated:
        (at,) = struct.unpack_from("<Q", relocated)
        struct.pack_into("<Q", frame, at + 8, size)
    return bytes(frame)
