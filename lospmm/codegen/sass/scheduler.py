"""Scheduling of a tile as machine code: registers, scoreboards and stalls.

Instructions keep the order that ``lospmm.codegen.schedule`` gave them, but for stores (``early``). What is decided
here is all that the hardware does not find out for itself (control fields as in ``form``):

- a load announces itself on a scoreboard. There are six, so loads share them in groups of consecutive columns, and the
  first multiply-add of a group waits for the whole group;
- a multiply-add may read an accumulator ``FMA_LATENCY`` cycles after the one before it was issued; it reads its
  operands when it is issued, so a buffer may be loaded anew by the very next instruction;
- the first multiply-add of an accumulator adds to R255, which is zero;
- memory is walked in windows, since a load or store does not reach further (``addresses``);
- the parts of a tile send each other sums (``exchange``); a part loads and adds received sums like elements of B;
- padding, bias, residual, ReLU and long rows are in ``layer``, elements of 16 bits in ``narrow``.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.ir import KernelProgram, TileProgram
from lospmm.codegen.ops import WINDOW_BYTES, ZERO, Op, filling, last_filled
from lospmm.codegen.sass import layer, narrow
from lospmm.codegen.sass.addresses import (
    ADDRESS_SCOREBOARD,
    ADDRESSES_OUTSTANDING,
    pause,
    raise_before,
    set_windows,
    window_pairs,
)
from lospmm.codegen.sass.early import stored_early
from lospmm.codegen.sass.exchange import Mailbox, exchange
from lospmm.codegen.sass.form import PT, RZ, Opcode, blank
from lospmm.codegen.sass.machine import CLUSTER_ENTRY, ENTRY, HARDWARE_REGISTERS, WALKS_ENTRY, EntryRegisters
from lospmm.problem.dtype import FLOAT_BYTES
from lospmm.problem.lanes import FLOAT_SUMS, in_lanes, lanes_of
from lospmm.problem.problem import Problem
from lospmm.space.registers import least_buffers

FMA_LATENCY = 4  # cycles; h200: measured on sm_90, and the same on sm_75 and up
EXIT_STALL = 5

SCOREBOARDS = 6

#: Registers beside accumulators and buffers, and HARDWARE_REGISTERS: the two addresses, two pairs for windows.
ADDRESS_REGISTERS = 4
WINDOW_REGISTERS = 4

#: Registers of the residual's address, and of the padding bits of a window.
_RESIDUAL_REGISTERS = 2
_PADDED_REGISTERS = 1


@dataclass(frozen=True, slots=True)
class Registers:
    """Register assignment: entry addresses are fixed, windows come first, then accumulators, then buffers."""

    accumulators: NDArray[np.uint8]
    buffers: NDArray[np.uint8]
    addresses: frozenset[int]

    @property
    def count(self) -> int:
        """REGCOUNT: the highest register named plus 3, since the hardware keeps two."""
        highest: int = max({*self.addresses, *self.accumulators.tolist(), *self.buffers.tolist()})
        return highest + 1 + HARDWARE_REGISTERS


def allocate(accumulators: int, buffers: int, entry: EntryRegisters, *, windows: bool) -> Registers:
    """Assign registers from the lowest up, leaving out those of addresses."""
    taken = set(entry.taken)
    if windows:
        taken.update(pair + half for pair in window_pairs(entry) for half in (0, 1))
    free = np.array([register for register in range(RZ) if register not in taken], np.uint8)
    return Registers(free[:accumulators], free[accumulators : accumulators + buffers], frozenset(taken))


def entry_of(program: KernelProgram) -> EntryRegisters:
    """Return the registers that the prologue fills for the tiles of ``program``."""
    if program.walks > 1:
        return WALKS_ENTRY
    is_shared = program.split_k > 1
    entry = CLUSTER_ENTRY if is_shared else ENTRY
    if program.epilogue.residual:
        entry = replace(entry, residual=8 if is_shared else 6)
    return replace(entry, padded=1 if is_shared else 0) if program.is_guarded else entry


def schedule_tile(tile: TileProgram, program: KernelProgram) -> tuple[NDArray[np.void], int]:
    """Return the machine code of one tile of ``program``, and its register count (REGCOUNT)."""
    tile = stored_early(tile, program)
    is_narrow = program.words in FLOAT_SUMS
    code = narrow.widened(tile.code, tile.buffers) if is_narrow else tile.code
    fmas = np.flatnonzero(code["op"] == Op.FMA)
    filled = filling(code)
    distance = _distances(code, program)
    windows = (distance + WINDOW_BYTES // 2) // WINDOW_BYTES
    far, entry = bool(windows.any()), entry_of(program)
    begun_anew = len(layer.overwritten_stores(code)[0]) > 0
    buffers = max(tile.buffers, least_buffers(program.split_k))
    registers = allocate(tile.accumulators, buffers, entry, windows=far)
    guards = program.guards(code, tile.buffers)

    form = blank(len(code))
    _set_memory(form, code, distance - windows * WINDOW_BYTES, registers, entry, program.words.stored_bytes)
    unset = set_arithmetic(form, code, fmas, registers, guards)
    waiting = narrow.waiting(code) if is_narrow else fmas
    own = SCOREBOARDS - (far or begun_anew or program.epilogue.residual)
    _set_scoreboards(form, code, filled, waiting, tile.buffers, own)
    set_stalls(form, code)
    if is_narrow:
        narrow.set_numbers(form, code, fmas, registers.buffers[: tile.buffers], program.dtype)
    pieces = layer.set_folds(form, code, registers.accumulators, guards)
    if far:
        pieces += set_windows(form, code, windows, entry)
    if entry.padded is not None:
        pieces += layer.cleared(unset) + layer.guard(form, code, guards, entry.padded)
    if begun_anew or not program.epilogue.is_plain:
        pieces += _epilogue(form, code, registers, program)
    if is_narrow:
        pieces += layer.before_stores(form, code, registers.accumulators, narrow.ROUNDING[program.dtype.name])
    if entry.peers is not None:
        assert program.cols is not None, "addresses of the mailbox are constants"
        mailbox = Mailbox(tile.slots, program.cols * FLOAT_BYTES)
        pieces += exchange(form, code, mailbox, entry, registers.accumulators, registers.buffers)
    pieces.append((len(form), leave()))
    before = np.array([at for at, _ in pieces if at]) - 1
    form["reuse"][before.astype(np.intp)] = 0  # the reuse cache lasts for the next instruction only
    return layer.inserted(form, pieces), registers.count


def _distances(code: NDArray[np.void], program: KernelProgram) -> NDArray[np.int64]:
    """Return the offset in bytes of each load or store within the thread's column of B, C or residual."""
    elements = np.zeros(len(code), np.int64)
    loads = code["op"] == Op.LOAD
    elements[loads] = program.b_elements(code["source"][loads])
    for op, field in ((Op.STORE, "target"), (Op.RESIDUAL, "source")):
        places = code["op"] == op
        elements[places] = code[field][places].astype(np.int64) * program.c_row_elements
    return elements * program.words.stored_bytes


def _set_memory(
    form: NDArray[np.void],
    code: NDArray[np.void],
    offsets: NDArray[np.int64],
    registers: Registers,
    entry: EntryRegisters,
    stored_bytes: int,
) -> None:
    loads, stores, residuals = (np.flatnonzero(code["op"] == op) for op in (Op.LOAD, Op.STORE, Op.RESIDUAL))
    memory = np.concatenate((loads, stores, residuals))
    form["bytes"][memory], form["ur"][memory], form["offset"][memory] = stored_bytes, entry.descriptor, offsets[memory]
    form["op"][loads], form["ra"][loads] = Opcode.LDG, entry.b
    form["rd"][loads] = registers.buffers[code["target"][loads]]
    if entry.residual is not None:
        form["op"][residuals], form["ra"][residuals] = Opcode.LDG, entry.residual
        form["rd"][residuals] = registers.accumulators[code["target"][residuals]]
        form["write_barrier"][residuals] = ADDRESS_SCOREBOARD
    form["op"][stores], form["ra"][stores] = Opcode.STG, entry.c
    sources = code["source"][stores]
    held = np.append(registers.accumulators, np.uint8(RZ))  # ZERO is -1: the last element
    assert ZERO == -1
    form["rb"][stores] = held[sources]


def set_arithmetic(
    form: NDArray[np.void],
    code: NDArray[np.void],
    fmas: NDArray[np.intp],
    registers: Registers,
    guards: NDArray[np.int64],
) -> NDArray[np.uint8]:
    """Set the operands of multiply-adds; a buffer that the next one reads too stays in the reuse cache.

    Returns the accumulators that must be zeroed first, since their first multiply-add may be skipped. Other first
    multiply-adds add to RZ.
    """
    targets = code["target"][fmas]
    form["op"][fmas] = Opcode.FFMA_IMM
    form["rd"][fmas] = form["rc"][fmas] = registers.accumulators[targets]
    form["ra"][fmas] = registers.buffers[code["source"][fmas]]
    form["immediate"][fmas] = code["weight"][fmas].view(np.uint32)
    used, first = np.unique(targets, return_index=True)
    is_begun = layer.begun(code, len(registers.accumulators))[used]
    is_guarded = guards[fmas[first]] != 0
    form["rc"][fmas[first[~is_begun & ~is_guarded]]] = RZ
    form["reuse"][fmas[:-1][(np.diff(fmas) == 1) & (np.diff(form["ra"][fmas].astype(np.int16)) == 0)]] = 1
    unset: NDArray[np.uint8] = registers.accumulators[used[~is_begun & is_guarded]]
    return unset


def _epilogue(
    form: NDArray[np.void], code: NDArray[np.void], registers: Registers, program: KernelProgram
) -> list[layer.Piece]:
    """Set bias, residual and their waits; return conversions and ReLU, by row."""
    layer.set_bias(form, code, registers.accumulators)
    for run in layer.runs_of(np.flatnonzero(code["op"] == Op.RESIDUAL)):
        pause(form, run[ADDRESSES_OUTSTANDING::ADDRESSES_OUTSTANDING])
    pause(form, layer.waits_for_residual(code))
    is_narrow = program.words in FLOAT_SUMS
    pieces = narrow.widened_residuals(form, code, registers.accumulators, program.dtype) if is_narrow else []
    stores, behind = layer.overwritten_stores(code)
    form["read_barrier"][stores] = ADDRESS_SCOREBOARD
    for run in np.split(stores, np.searchsorted(stores, behind)):
        pause(form, run[ADDRESSES_OUTSTANDING::ADDRESSES_OUTSTANDING])
    pause(form, behind)
    if program.epilogue.relu:
        pieces += layer.before_stores(form, code, registers.accumulators, Opcode.FMNMX_NAN)
    return pieces


def _set_scoreboards(
    form: NDArray[np.void],
    code: NDArray[np.void],
    loads: NDArray[np.intp],
    fmas: NDArray[np.intp],
    buffers: int,
    scoreboards: int,
) -> None:
    """Set scoreboards of loads, shared by groups of consecutive columns, and the waits for them."""
    columns = max(1, -(-buffers // scoreboards))
    group = np.arange(len(loads)) // columns
    form["write_barrier"][loads] = group % scoreboards
    used, before = last_filled(code, loads, fmas, buffers), np.searchsorted(loads, fmas)
    first = np.diff(used // columns, prepend=-1) != 0
    # Of the group in which sums of other blocks begin, some are issued after the group was waited for.
    held_back = used >= before[np.flatnonzero(first)][np.cumsum(first) - 1]
    starts = np.flatnonzero(first | (held_back & (np.diff(used, prepend=-1) != 0)))
    form["wait"][fmas[starts]] = 1 << (used[starts] // columns % scoreboards)
    waiting = loads[form["wait"][np.minimum(loads + 1, len(form) - 1)] != 0] + 1
    raise_before(form, waiting)


def set_stalls(form: NDArray[np.void], code: NDArray[np.void]) -> None:
    """Set stalls that cover the latency of multiply-adds of the same accumulator."""
    sums = np.flatnonzero((code["op"] == Op.FMA) | (code["op"] == Op.FOLD))
    folded = sums[code["op"][sums] == Op.FOLD]
    places = np.concatenate((sums, folded))
    used = np.concatenate((code["target"][sums], code["source"][folded]))
    order = np.lexsort((places, used))
    same = np.flatnonzero(np.diff(used[order]) == 0)
    earlier, later = places[order[same]], places[order[same + 1]]
    missing = FMA_LATENCY - (later - earlier)
    short = missing > 0
    np.maximum.at(form["stall"], later[short] - 1, (1 + missing[short]).astype(np.uint8))
    # The last sums are stored or sent next.
    met = np.flatnonzero(code["op"] == Op.EXCHANGE)
    for end in (len(code), *met, *_stores_at_once(code)):
        for last in sums[sums < end][-1:]:
            form["stall"][last] = max(int(form["stall"][last]), FMA_LATENCY + 2)


def _stores_at_once(code: NDArray[np.void]) -> NDArray[np.intp]:
    """Return where runs of stores begin whose sums the preceding instructions completed."""
    stores = np.flatnonzero(code["op"] == Op.STORE)
    begins = np.diff(stores, prepend=-2) != 1
    start = stores[begins][np.cumsum(begins) - 1]
    fresh = np.zeros(len(stores), np.bool_)
    for distance in range(1, FMA_LATENCY + 2):
        before = np.maximum(start - distance, 0)
        is_sum = np.isin(code["op"][before], (Op.FMA, Op.FOLD))
        fresh |= is_sum & (code["target"][before] == code["source"][stores])
        fresh |= code["op"][before] == Op.ADD  # after the last multiply-add
    return np.unique(start[fresh])


def leave(predicate: int = PT) -> NDArray[np.void]:
    """Return the end of a thread, where ``predicate`` is true."""
    form = blank(1)
    form["op"], form["stall"], form["predicate"] = Opcode.EXIT, EXIT_STALL, predicate
    return form


def reserved_registers(problem: Problem) -> int:
    """Return the registers a thread needs beside accumulators and buffers."""
    matrix, convolution = problem.matrix, problem.convolution
    if convolution is None:
        furthest = (max(matrix.m, matrix.k) - 1) * in_lanes(problem).n
    else:
        furthest = max(convolution.image_elements, (matrix.m - 1) * convolution.pixels)
    far = furthest * lanes_of(problem).stored_bytes >= WINDOW_BYTES // 2
    return ADDRESS_REGISTERS + HARDWARE_REGISTERS + WINDOW_REGISTERS * far + layer_registers(problem)


def layer_registers(problem: Problem) -> int:
    """Return the registers a thread needs for the residual and for a convolution's padding."""
    is_padded = problem.convolution is not None and problem.convolution.is_padded
    return _RESIDUAL_REGISTERS * problem.epilogue.residual + _PADDED_REGISTERS * is_padded
