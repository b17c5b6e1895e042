"""Two columns of 16 bits a thread, with float32 sums: machine code of one column (``narrow``) doubled.

A load brings the elements of two neighbouring columns, the lower half of a register first, so there are half as many
loads. The upper element becomes a float32 in a register of its own while it is multiplied, one of a small ring;
elements in flight take no second register. Every accumulator is two registers. Arithmetic is there once for each
column, multiply-adds of one element one after another, so that it stays in the reuse cache; one rounding packs two
sums, and one store writes them.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.sass.form import RZ, Opcode
from lospmm.codegen.sass.machine import HARDWARE_REGISTERS, MachineCode, padding
from lospmm.errors import Unsupported
from lospmm.problem.dtype import Dtype

#: Instructions that are emitted for each of the two columns.
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
    """Return ``code`` of 4-byte words as code for both columns of each word, of 2 bytes as in ``narrow``.

    Raises Unsupported for a tile that blocks share, and for more registers than a thread has.
    """
    if code.split_k > 1 or code.entry.padded is not None:
        raise Unsupported(f"two columns of {dtype.name} to a thread: of products, and tiles of one block")
    form = code.form
    pairs = np.unique(form["ra"][np.isin(form["op"], (Opcode.LDG, Opcode.STG))]).tolist()  # pairs with addresses
    taken = {*code.entry.taken, *pairs, *(pair + 1 for pair in pairs)}
    free = np.array([register for register in range(4 * RZ) if register not in taken])  # leaves pairs free
    tiles, highest = [], max(taken)
    for start, end in zip(code.starts, [*code.starts[1:], len(form)], strict=True):
        tile = form[start:end]
        lower, upper, own = _renamed(tile[tile["op"] != Opcode.NOP], free)
        highest = max(highest, own)
        if highest + HARDWARE_REGISTERS >= RZ:
            count = highest + 1 + HARDWARE_REGISTERS
            raise Unsupported(f"{count} registers a thread: a smaller tile, or less prefetch")
        doubled = _twice(lower, upper)
        tiles.append(np.concatenate((doubled, padding(len(doubled)))))
    starts = np.cumsum([0, *(len(tile) for tile in tiles[:-1])])
    registers = highest + 1 + HARDWARE_REGISTERS
    return replace(code, form=np.concatenate(tiles), starts=starts, registers=registers)


def _renamed(tile: NDArray[np.void], free: NDArray[np.int64]) -> tuple[NDArray[np.void], NDArray[np.void], int]:
    """Return a tile with the registers of its lower columns, with those of its upper ones, and the highest register.

    Of ``free`` registers each sum has two, a buffer one, and the elements' upper halves a ring.
    """
    named = np.zeros(RZ + 1, np.bool_)
    for op, operands in _NUMBERS.items():
        for operand in operands:
            named[tile[operand][tile["op"] == op]] = True
    buffers = np.unique(tile["ra"][tile["op"] == Opcode.FFMA_IMM])
    named[buffers], named[RZ] = False, False
    sums = np.flatnonzero(named)
    low, high = np.full((2, RZ + 1), RZ)
    low[sums], high[sums] = free[: 2 * len(sums)].reshape(-1, 2).T
    low[buffers] = high[buffers] = free[2 * len(sums) : 2 * len(sums) + len(buffers)]
    used = 2 * len(sums) + len(buffers)
    lower, upper = tile.copy(), tile.copy()
    for op, operands in _NUMBERS.items():
        where = tile["op"] == op
        for operand in operands:
            lower[operand][where], upper[operand][where] = low[tile[operand][where]], high[tile[operand][where]]
    fmas = np.flatnonzero(tile["op"] == Opcode.FFMA_IMM)
    if not len(fmas):
        return lower, upper, int(free[used - 1]) if used else 0
    converted, element = _elements(tile, buffers, fmas)
    last = np.zeros(len(converted), np.int64)
    last[element] = fmas  # ascending: the last write wins
    ring = int((np.searchsorted(converted, last) - np.arange(len(converted))).max())
    halves = free[used : used + ring]
    upper["rd"][converted] = halves[np.arange(len(converted)) % ring]
    upper["ra"][fmas] = halves[element % ring]
    return lower, upper, int(free[used + ring - 1])


def _elements(
    tile: NDArray[np.void], buffers: NDArray[np.uint8], fmas: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Return the conversions of what buffers hold, and the number of the one that each multiply-add uses."""
    converted = np.flatnonzero(np.isin(tile["op"], list(_UPPER)) & np.isin(tile["rd"], buffers))
    keys = tile["rd"][converted].astype(np.int64) * len(tile) + converted
    order = np.argsort(keys)
    found = np.searchsorted(keys[order], tile["ra"][fmas].astype(np.int64) * len(tile) + fmas) - 1
    return converted, order[found]


def _twice(lower: NDArray[np.void], upper: NDArray[np.void]) -> NDArray[np.void]:
    """Merge the instructions of both columns into one order."""
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
    """Give the wait to the first of two instructions, the stall to the second."""
    second["wait"][which] = 0
    first["stall"][which], first["yields"][which] = 1, 0
