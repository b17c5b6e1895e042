"""Address registers of a tile: windows of memory, and waits until an address has been read.

A load or store reaches 8 MiB either side of its address (24 bits with a sign), so memory is walked in windows of 16
MiB, each with a pair of registers for its address. A pair may change once all that use it have read it, which a
scoreboard signals.
"""

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.ops import WINDOW_BYTES, Op
from lospmm.codegen.sass.form import Opcode, blank
from lospmm.codegen.sass.machine import EntryRegisters

ALU_LATENCY = 12  # cycles; more than any integer instruction takes, where it costs nothing

#: The scoreboard that signals that an address has been read: of windows, and of sends.
ADDRESS_SCOREBOARD = 5

#: Loads and stores on it between two waits.
ADDRESSES_OUTSTANDING = 60

_CARRY = 0  # the predicate between the two halves of an address


def window_pairs(entry: EntryRegisters) -> tuple[int, int]:
    """Return the register pairs of windows: of loads, which go on after a tile's stores, and of the rest."""
    first, second = [pair for pair in range(8, 16, 2) if pair not in entry.taken][:2]
    return first, second


def set_windows(
    form: NDArray[np.void], code: NDArray[np.void], windows: NDArray[np.int64], entry: EntryRegisters
) -> list[tuple[int, NDArray[np.void]]]:
    """Set the address registers of far accesses; return the instructions that fill them, by place."""
    pieces: list[tuple[int, NDArray[np.void]]] = []
    bases = {Op.LOAD: entry.b, Op.STORE: entry.c, Op.RESIDUAL: entry.residual}
    for pair, ops in zip(window_pairs(entry), ((Op.LOAD,), (Op.STORE, Op.RESIDUAL)), strict=True):
        places = np.flatnonzero(np.isin(code["op"], ops))
        is_other = np.diff(windows[places], prepend=0) | np.diff(code["op"][places], prepend=code["op"][places[:1]])
        changes = np.flatnonzero(is_other)
        runs = [
            (places[first:last], int(windows[places[first]]), bases[Op(code["op"][places[first]])])
            for first, last in zip(changes, np.append(changes[1:], len(places))[: len(changes)], strict=True)
        ]
        runs = [run for run in runs if run[1] and run[2] is not None]
        moved = {run[1:] for run in runs}
        stays = len(moved) == 1 and len(runs) > 1  # set once for all its users
        for users, window, base in runs:
            assert base is not None
            form["ra"][users] = pair
            if stays and (window, base) not in moved:
                continue
            if code["op"][users[0]] != Op.RESIDUAL and not stays:  # residuals signal on the same scoreboard
                form["read_barrier"][users] = ADDRESS_SCOREBOARD
                pause(form, users[ADDRESSES_OUTSTANDING::ADDRESSES_OUTSTANDING])
            moved.discard((window, base))
            raise_before(form, users[:1])
            pieces.append((int(users[0]), move(pair, base, window * WINDOW_BYTES)))
    return pieces


def pause(form: NDArray[np.void], places: NDArray[np.intp]) -> None:
    """Wait at ``places`` for addresses that are still unread: a scoreboard counts no further than 63."""
    form["wait"][places] |= 1 << ADDRESS_SCOREBOARD
    raise_before(form, places)


def raise_before(form: NDArray[np.void], places: NDArray[np.intp]) -> None:
    """Stall one cycle more before ``places``: a scoreboard rises a cycle after its instruction's issue."""
    before = np.maximum(places - 1, 0)
    form["stall"][before] = np.maximum(form["stall"][before], 2)


def move(pair: int, base: int, distance: int) -> NDArray[np.void]:
    """Return pair = base + distance, in 64 bits, once the pair's last address has been read."""
    form = blank(2)
    form["op"] = Opcode.IADD3, Opcode.IADD3_X
    form["rd"], form["ra"] = (pair, pair + 1), (base, base + 1)
    form["immediate"] = distance & 0xFFFFFFFF, distance >> 32 & 0xFFFFFFFF
    form["carry"], form["stall"], form["yields"] = _CARRY, ALU_LATENCY, 1
    form["wait"][0] = 1 << ADDRESS_SCOREBOARD
    return form
