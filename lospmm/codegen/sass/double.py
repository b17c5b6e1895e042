"""Two columns of 16 bits to a thread, with sums in float32: machine code of one column (``narrow``) done twice.

A load brings the elements of two neighbouring columns, the lower half of a register first, so there are half as many
loads; the upper one becomes a float32 in the register behind. Every accumulator is two registers. What computes is
there once for each column, multiply-adds of one element one after another, so that it stays in the reuse cache; one
rounding packs two sums, and one store writes them.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.sass.form import RZ, Opcode
from lospmm.codegen.sass.machine import MachineCode
from lospmm.codegen.sass.scheduler import HARDWARE_REGISTERS, padding
from lospmm.dtype import Dtype
from lospmm.errors import Unsupported

#: What is done for each column: with its registers, and those of the next.
_TWICE = (Opcode.FFMA_IMM, Opcode.MOV_IMM, Opcode.FADD_IMM, Opcode.FMNMX_NAN)

#: Operands that are registers of numbers, by instruction; those of addresses stay as they are.
_NUMBERS: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        Opcode.FFMA_IMM: ("rd", "ra", "rc"),
        Opcode.MOV_IMM: ("rd",),
        Opcode.FADD_IMM: ("rd", "ra"),
        Opcode.FMNMX_NAN: ("rd", "ra", "rb"),
        Opcode.HADD2_F32: ("rd", "rb"),
        Opcode.SHF_L: ("rd", "ra"),
        Opcode.F2FP_F16: ("rd", "rb"),
        Opcode.F2FP_BF16: ("rd", "rb"),
        Opcode.LDG: ("rd",),
        Opcode.STG: ("rb",),
    }
)

#: The upper half of a word as float32, of its lower half: instruction and immediate.
_UPPER: Mapping[int, tuple[Opcode, int]] = MappingProxyType(
    {Opcode.HADD2_F32: (Opcode.HADD2_F32, 1), Opcode.SHF_L: (Opcode.PRMT, 0x3244)}
)

_ROUNDINGS = (Opcode.F2FP_F16, Opcode.F2FP_BF16)


def two_columns(code: MachineCode, dtype: Dtype) -> MachineCode:
    """``code``, which loads and stores words of 4 bytes as ``narrow`` has elements of 2, for both columns of a word.

    Raises Unsupported for a tile that blocks share, and for more registers than a thread has.
    """
    if code.split_k > 1 or code.entry.padded is not None:
        raise Unsupported(f"two columns of {dtype.name} to a thread: of products, and tiles of one block")
    form = code.form
    named = np.zeros(RZ + 1, np.bool_)
    for op, operands in _NUMBERS.items():
        for operand in operands:
            named[form[operand][form["op"] == op]] = True
    numbers = np.flatnonzero(named[:RZ])
    taken = {*code.entry.taken, *np.unique(form["ra"][np.isin(form["op"], (Opcode.LDG, Opcode.STG))]).tolist()}
    pairs = [pair for pair in range(0, 2 * RZ, 2) if not taken & {pair, pair + 1}][: len(numbers)]
    highest = max(*taken, *(pair + 1 for pair in pairs))
    if highest + HARDWARE_REGISTERS >= RZ:
        raise Unsupported(f"{highest + 1 + HARDWARE_REGISTERS} registers a thread: a smaller tile, or less prefetch")
    names = np.full(RZ + 1, RZ)
    names[numbers] = pairs
    tiles = [
        _twice(form[start:end], names) for start, end in zip(code.starts, [*code.starts[1:], len(form)], strict=True)
    ]
    tiles = [np.concatenate((tile, padding(len(tile)))) for tile in tiles]
    starts = np.cumsum([0, *(len(tile) for tile in tiles[:-1])])
    registers = highest + 1 + HARDWARE_REGISTERS
    return replace(code, form=np.concatenate(tiles), starts=starts, registers=registers)


def _twice(tile: NDArray[np.void], names: NDArray[np.int64]) -> NDArray[np.void]:
    lower = tile[tile["op"] != Opcode.NOP].copy()
    upper = lower.copy()
    for op, operands in _NUMBERS.items():
        where = lower["op"] == op
        for operand in operands:
            register = names[lower[operand][where]]
            lower[operand][where] = register
            upper[operand][where] = np.where(register == RZ, RZ, register + 1)
    rounded = np.isin(lower["op"], _ROUNDINGS)
    lower["ra"][rounded] = upper["rb"][rounded]
    widened = np.isin(lower["op"], list(_UPPER))
    upper["rb"], upper["ra"] = np.where(widened, lower["rb"], upper["rb"]), np.where(widened, lower["ra"], upper["ra"])
    for op, (opcode, immediate) in _UPPER.items():
        where = lower["op"] == op
        upper["op"][where], upper["immediate"][where] = opcode, immediate
    fma = lower["op"] == Opcode.FFMA_IMM
    twice = widened | np.isin(lower["op"], _TWICE)
    # Of conversions the upper one comes first, and waits; of all else the lower. The second has the stall.
    _in_turn(upper, lower, widened)
    _in_turn(lower, upper, twice & ~widened & ~fma)
    upper["wait"][fma] = 0
    # Multiply-adds by one element: all of its lower column, then all of its upper one.
    element = np.where(fma, lower["ra"].astype(np.int64), -1 - np.arange(len(lower)))
    run = np.cumsum(np.diff(element, prepend=-(1 << 20)) != 0)
    rows = np.concatenate((np.arange(len(lower)), np.flatnonzero(twice)))
    later = np.concatenate((widened, ~widened[twice]))
    order = np.lexsort((rows, later, run[rows]))
    out: NDArray[np.void] = np.concatenate((lower, upper[twice]))[order]
    return out


def _in_turn(first: NDArray[np.void], second: NDArray[np.void], which: NDArray[np.bool_]) -> None:
    """The first of two has the wait, the second the stall."""
    second["wait"][which] = 0
    first["stall"][which], first["yields"][which] = 1, 0
