"""Code fetch: each tile loads its own code into the L2 cache, behind its first loads of B.

Between two launches of a kernel other kernels have pushed its code out of the L2 cache. Blocks walk their code once
and in order, so they would wait for memory at every few lines of it (docs/decisions/0028). Here each thread loads a
word of two sectors of its tile's code, and of others behind it, into no register; nothing waits for them. Neighbouring
blocks of a tile, which run on SMs beside each other, share it out. First come the loads of B that are issued before
any is waited for: where the code is in the cache, the fetch then delays nothing.

They are loads, not prefetches: a prefetch fills only the half of the L2 cache that its memory belongs to, a load also
the SM's half. They lack the hint of loads of B ("no allocation"), whose lines are evicted first. compute-sanitizer
reports them as reads outside of any array: LOSPMM_FETCH_CODE=0 leaves them out.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.ir import KernelProgram, launch
from lospmm.codegen.sass.addresses import ADDRESS_SCOREBOARD, ALU_LATENCY, window_pairs
from lospmm.codegen.sass.form import RZ, Opcode, blank
from lospmm.codegen.sass.listing import BYTES_PER_INSTRUCTION
from lospmm.codegen.sass.machine import (
    ENTRY,
    HARDWARE_REGISTERS,
    LINE_INSTRUCTIONS,
    TOUCHED_BYTES,
    EntryRegisters,
    MachineCode,
    padding,
)
from lospmm.settings import settings

#: With less code, the fetch costs as much as it gains: 0.05 us (docs/decisions/0028).
MIN_CODE_BYTES = 96 << 10

#: The fetched code must not evict B or itself: a quarter of an H200's L2 cache.
MAX_CODE_BYTES = 15 << 20

#: Numbers of neighbouring blocks that share a fetch, if the number of blocks is a multiple.
SHARERS = (4, 2)

#: The most loads of a thread: code after them is not fetched.
MAX_LOADS = 32

#: Smaller tiles, such as those of empty rows, are not fetched.
MIN_TILE_BYTES = 4 << 10

#: Cycles from ``LEPC`` to the first read of its result: more than its latency.
LEPC_LATENCY = 15

#: The register in which ptxas 13.0 leaves a thread's fetch offset.
FETCHED = 7

#: The predicate that carries between the two halves of an address.
_CARRY = 0


def sharers_of(program: KernelProgram, code_bytes: int) -> int:
    """Return how many neighbouring blocks fetch a tile's code together; 0: nothing is fetched.

    ``code_bytes`` is the size of the kernel's code.
    """
    if not settings().fetch_code or program.cols is None:
        return 0
    if not MIN_CODE_BYTES <= code_bytes <= MAX_CODE_BYTES:
        return 0
    members = launch(program).grid[0]
    fits = (count for count in SHARERS if members % count == 0 and span_bytes(program.cols, count) <= code_bytes)
    return next(fits, 1)


def span_bytes(threads: int, sharers: int) -> int:
    """Return the bytes of code that one load of all threads of all sharers covers."""
    return threads * sharers * TOUCHED_BYTES


def fetching(code: MachineCode, span: int) -> MachineCode:
    """Return ``code`` with a fetch of itself in each tile.

    One load of all threads that share a tile covers ``span`` bytes.
    """
    entry = replace(code.entry, fetched=_fetched(code.entry))
    ends = [*code.starts[1:].tolist(), len(code.form)]
    tiles = [_unpadded(code.form[start:end]) for start, end in zip(code.starts.tolist(), ends, strict=True)]
    loads = [_loads(len(tile), span) for tile in tiles]
    lengths = [len(tile) + _head_length(count) for tile, count in zip(tiles, loads, strict=True)]
    starts = np.cumsum([0, *(length + len(padding(length)) for length in lengths)])
    last_offset = BYTES_PER_INSTRUCTION * int(starts[-1]) - span
    assert last_offset >= 0, "no more is loaded than there is"
    pair = next(first for first in range(0, code.registers, 2) if not {first, first + 1} & entry.filled)
    parts = []
    for tile, count, start in zip(tiles, loads, starts[:-1].tolist(), strict=True):
        at, board = _place(tile, {pair, pair + 1, entry.fetched}) if count else (0, ADDRESS_SCOREBOARD)
        offsets = np.minimum(np.arange(count) * span, last_offset - BYTES_PER_INSTRUCTION * start)
        head = _head(offsets - BYTES_PER_INSTRUCTION * at, entry, pair, board)
        rest = tile[at:].copy()
        if count:
            rest["wait"][0] |= 1 << board  # loads have read the address before any register is written
        parts += [tile[:at], head, rest, padding(len(tile) + len(head))]
    form = np.concatenate(parts)
    assert entry.fetched is not None
    highest = max(pair + 1, entry.fetched)  # above all others where a tile has one row and one element in flight
    registers = max(code.registers, highest + 1 + HARDWARE_REGISTERS)
    return replace(code, form=form, starts=starts[:-1], registers=registers, entry=entry)


def _place(tile: NDArray[np.void], registers: set[int | None]) -> tuple[int, int]:
    """Return before which instruction of ``tile`` its code is fetched, and a scoreboard that this one waits for.

    It is the first that waits, if none before it writes ``registers``: nothing that was loaded has been used yet.
    """
    at = int(np.argmax(tile["wait"] != 0))
    if tile["wait"][at] == 0 or registers & set(tile["rd"][:at].tolist()):
        return 0, ADDRESS_SCOREBOARD
    return at, int(tile["wait"][at]).bit_length() - 1


def _fetched(entry: EntryRegisters) -> int:
    """Return the register of the fetch offset: as ptxas chooses it, or one outside of address pairs."""
    if entry == ENTRY:
        return FETCHED
    used = entry.taken.union(*({pair, pair + 1} for pair in window_pairs(entry)))
    return next(register for register in range(RZ) if register not in used)


def _unpadded(tile: NDArray[np.void]) -> NDArray[np.void]:
    """Return the tile without the NOPs after its end."""
    end = tile["op"][-LINE_INSTRUCTIONS:]
    return tile[: len(tile) - int(np.argmax(end[::-1] != Opcode.NOP))]


def _loads(rows: int, span: int) -> int:
    """Return how many loads a thread needs for a tile of ``rows`` instructions and the fetch before it."""
    if BYTES_PER_INSTRUCTION * rows < MIN_TILE_BYTES:
        return 0
    count = 1
    while count < MAX_LOADS and count * span < BYTES_PER_INSTRUCTION * (rows + _head_length(count)):
        count += 1
    return count


def _head_length(loads: int) -> int:
    return 3 + loads if loads else 0


def _head(offsets: NDArray[np.integer], entry: EntryRegisters, pair: int, board: int) -> NDArray[np.void]:
    """Return ``pair`` = its own address + ``entry.fetched``, and a load at each of ``offsets`` from it."""
    form = blank(_head_length(len(offsets)))
    if not len(offsets):
        return form
    assert entry.fetched is not None
    address, low, high, loads = form[:1], form[1:2], form[2:3], form[3:]
    address["op"], address["rd"] = Opcode.LEPC, pair
    low["op"], low["rd"], low["ra"], low["rc"], low["carry"] = Opcode.IADD3, pair, pair, entry.fetched, _CARRY
    high["op"], high["rd"], high["ra"], high["carry"] = Opcode.IADD3_X, pair + 1, pair + 1, _CARRY
    for rows, stall in ((address, LEPC_LATENCY), (low, ALU_LATENCY), (high, ALU_LATENCY)):
        rows["stall"], rows["yields"] = stall, 1
    loads["op"], loads["ra"], loads["ur"], loads["offset"] = Opcode.TOUCH, pair, entry.descriptor, offsets
    loads["read_barrier"], loads["stall"] = board, 2
    return form
