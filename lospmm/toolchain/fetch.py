"""What a prologue that fetches its kernel's code lacks in PTX: where the code is, how much of it each block fetches,
and how many blocks do (``codegen.sass.fetch``)."""

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.sass.fetch import BLOCKS_MARK, BYTES_MARK, UNIT_BYTES
from lospmm.codegen.sass.listing import BYTES_PER_INSTRUCTION
from lospmm.errors import ToolchainFault

#: The clock, ``CS2R Rd, SR_CLOCKLO``: its bits but for the register and the control fields (bits 105 and up).
_CLOCK = 0x7805, 0x15000
_REGISTER = 0xFF << 16
_CONTROL = ~((1 << 41) - 1)

#: ``LEPC Rd``, the address of the instruction itself.
_ADDRESS = 0x734E

#: The largest size that the instruction takes.
_MAX_UNITS = (1 << 16) - 1


def filled(head: bytes, code_bytes: int, blocks: int) -> bytes:
    """The prologue ``head`` of a kernel that has ``code_bytes`` of code, ``head`` with it, of which ``blocks`` blocks
    fetch a part each. Raises ToolchainFault where ptxas made something else of the text."""
    words = np.frombuffer(head, "<u8").reshape(-1, 2).astype(np.uint64)
    clock = _only(
        np.flatnonzero(
            (words[:, 0] & np.uint64(~_REGISTER & (1 << 64) - 1) == _CLOCK[0])
            & (words[:, 1] & np.uint64((1 << 41) - 1) == _CLOCK[1])
        ),
        "the clock",
    )
    read_address(words, clock)
    units = min(_MAX_UNITS, (code_bytes - BYTES_PER_INSTRUCTION * clock) // UNIT_BYTES // blocks)
    numbers = ((BLOCKS_MARK, blocks), (BYTES_MARK, units * UNIT_BYTES), (BYTES_MARK // UNIT_BYTES, units))
    places = [_only(np.flatnonzero(_immediates(words) == mark), f"{mark:#x}") for mark, _ in numbers]
    for place, (_, number) in zip(places, numbers, strict=True):
        words[place, 0] = words[place, 0] & np.uint64((1 << 32) - 1) | np.uint64(number << 32)
    return words.astype("<u8").tobytes()


def read_address(words: NDArray[np.uint64], at: int) -> None:
    """Instruction ``at`` of (instructions, 2) words, which writes a register, writes its own address there instead."""
    words[at, 0] = words[at, 0] & np.uint64(_REGISTER) | np.uint64(_ADDRESS)
    words[at, 1] &= np.uint64(_CONTROL & (1 << 64) - 1)


def _immediates(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What stands where an instruction has an immediate, if it has one."""
    return words[:, 0] >> np.uint64(32)


def _only(found: NDArray[np.intp], what: str) -> int:
    if len(found) != 1:
        raise ToolchainFault(f"the prologue has {what} {len(found)} times, not once")
    return int(found[0])
