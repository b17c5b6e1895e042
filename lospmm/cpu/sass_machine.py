"""Our machine code on a CPU: all chosen threads at once, each register a NumPy vector with one element per thread.

A tile's code is run from its first instruction to its EXIT, as one warp, and held against ``Hazards`` on the way: what
runs through here computes the same on a GPU, whatever its memory takes. What runs before the tiles (``prologue``) is
not run: threads without a column have left, the others find their addresses in the registers of ``Entry``. The parts
of a tile that several blocks share run in turn, each until it has to wait for the others (``Block``).

What each instruction means is a function in ``OPERATIONS``. A tile that no blocks share is given no shared memory.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.emission import Emission
from lospmm.codegen.interpret import fused_multiply_add
from lospmm.codegen.sass.fields import Generation, encode
from lospmm.codegen.sass.form import PT, RZ, Opcode
from lospmm.codegen.sass.generations import generation_of
from lospmm.codegen.sass.listing import BYTES_PER_INSTRUCTION, text
from lospmm.codegen.sass.machine import MachineCode
from lospmm.cpu.cluster import cluster_of
from lospmm.cpu.fault import SassFault
from lospmm.cpu.geometry import CODE_ADDRESS, Geometry
from lospmm.cpu.halves import bits_of, values_of
from lospmm.cpu.hazards import Hazard, Hazards, Instruction, instructions
from lospmm.cpu.sass_arithmetic import ARITHMETIC, target_of
from lospmm.cpu.warp import WORD_MASK, Operand, Warp, at_entry
from lospmm.errors import ToolchainFault, VerificationFailed
from lospmm.problem.dtype import FLOAT_BYTES
from lospmm.stages import Count, uncounted

#: A tile that issues more instructions than this many times its length does not end.
LOOP_LIMIT = 16


def execute(
    code: MachineCode,
    geometry: Geometry,
    columns: NDArray[np.int64],
    b: NDArray[np.float32],
    residual: NDArray[np.float32] | None = None,
    progress: Count = uncounted,
) -> NDArray[np.float32]:
    """C (m, columns) of machine code, as a row of ``RUNTIMES`` does it for an emission.

    Raises VerificationFailed for a hazard, an address that is not the thread's own, an element of another block that
    may not be there, code that cannot be encoded, and code that does not end.
    """
    generation = generation_of(code.arch)
    try:
        encode(code.form, generation)
    except ToolchainFault as fault:
        raise VerificationFailed(f"machine code: {fault}") from None
    _check_descriptors(code, generation)
    parts, size = code.split_k, BYTES_PER_INSTRUCTION * len(code.form)
    if len(code.dispatch) % parts:
        raise VerificationFailed(f"machine code: {len(code.dispatch)} block rows are not tiles of {parts} parts each")
    c = np.full((geometry.m, len(columns)), np.nan, dtype=np.float32)
    own_columns, own = _threads_of(geometry, columns)
    own_b, own_c = b[:, own], c[:, own]
    third = None if residual is None else residual[:, own]
    # A sum beyond float32 is infinite, on a GPU as here; it is not worth a warning.
    with np.errstate(over="ignore", invalid="ignore"):
        every = zip(*(code.dispatch[part::parts] for part in range(parts)), strict=True)
        tiles = tuple(dict.fromkeys(every))  # twice the same stores the same
        for done, tile in enumerate(tiles):
            progress(done, len(tiles))
            blocks = cluster_of(parts, geometry, own_columns)
            warps = [at_entry(code.entry, geometry, own_b, own_c, block, size, third) for block in blocks]
            running = [_run_part(code, part, warp, generation) for part, warp in zip(tile, warps, strict=True)]
            while running:  # each goes on as far as it can
                running = [part for part in running if next(part, False)]
    c[:, own] = own_c
    return c


def _threads_of(geometry: Geometry, columns: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first column of each thread that has one, and where among ``columns`` all of them are: the first ones, then
    those of the next walk. Of threads with several columns all must be there."""
    if geometry.walks == 1:
        inside = np.flatnonzero(columns < geometry.n)
        return columns[inside], inside
    steps = geometry.cols * np.arange(geometry.walks)
    first = np.unique(geometry.first_columns(columns))
    whole = np.isin(np.add.outer(first, steps), columns).all(axis=1)  # others are computed by the next block too
    own = np.add.outer(steps, first[whole]).reshape(-1)
    assert np.isin(columns, own).all(), "all columns of each thread"
    order = np.argsort(columns)
    return first[whole], order[np.searchsorted(columns, own, sorter=order)]


def execute_emission(
    emission: Emission,
    geometry: Geometry,
    columns: NDArray[np.int64],
    b: NDArray[np.float32],
    residual: NDArray[np.float32] | None = None,
    progress: Count = uncounted,
) -> NDArray[np.float32]:
    """The row of ``RUNTIMES``: an emission of machine code. Raises as ``execute``."""
    assert emission.machine is not None, "an emission in this language holds machine code"
    return execute(emission.machine, geometry, columns, b, residual, progress)


def _check_descriptors(code: MachineCode, generation: Generation) -> None:
    """Loads and stores name the uniform register that the prologue fills, where a generation has it."""
    form = code.form
    memory = {Opcode.LDG, Opcode.STG, Opcode.ST} & generation.by_op.keys()
    described = [op for op in memory if "ur" not in generation.by_op[op].unused]
    wrong = np.flatnonzero(np.isin(form["op"], described) & (form["ur"] != code.entry.descriptor))
    if len(wrong):
        number = int(wrong[0])
        tile = int(np.searchsorted(code.starts, number, side="right")) - 1
        reason = f"UR{form['ur'][number]} does not hold the descriptor, UR{code.entry.descriptor} does"
        raise _refusal(code, tile, number, reason, generation)


def _run_part(code: MachineCode, tile: int, warp: Warp, generation: Generation) -> Iterator[bool]:
    """Execute a tile, or a block's part of one; yields True while it waits for the other parts."""
    if not 0 <= tile < len(code.starts):
        raise VerificationFailed(f"machine code: a block row runs tile {tile} of {len(code.starts)}")
    first = int(code.starts[tile])
    behind = int(min(code.starts[code.starts > first], default=len(code.form)))
    body = instructions(code.form[first:behind])
    hazards = Hazards(code.registers, code.entry.filled)
    index = last = 0
    for _ in range(LOOP_LIMIT * len(body)):
        if not 0 <= index < len(body):
            reason = f"goes on outside the tile, at instruction {first + index}"
            raise _refusal(code, tile, first + last, reason, generation)
        last = index
        instruction = body[index]
        if instruction.op == Opcode.LEPC:
            instruction = instruction._replace(offset=BYTES_PER_INSTRUCTION * (first + index))
        try:
            hazards.issue(instruction)
            distance = _step(warp, instruction)
        except (Hazard, SassFault) as why:
            raise _refusal(code, tile, first + index, str(why), generation) from None
        if distance is None:
            return
        while instruction.op == Opcode.CLUSTER_WAIT and warp.block.is_held:
            yield True
        index += 1 + distance
    reason = f"the tile has not ended after {LOOP_LIMIT} times its {len(body)} instructions"
    raise _refusal(code, tile, first + last, reason, generation)


def _refusal(code: MachineCode, tile: int, number: int, reason: str, generation: Generation) -> VerificationFailed:
    quoted = "".join(text(code.form[number : number + 1], generation))
    place = f"instruction {number} (at {number * BYTES_PER_INSTRUCTION:#x})"
    return VerificationFailed(f"machine code: tile {tile}, {place}, {quoted}: {reason}")


def _step(warp: Warp, instruction: Instruction) -> int | None:
    """Execute; how many instructions are jumped over, None where the threads leave."""
    if instruction.predicate == PT and not instruction.predicate_negated:
        return OPERATIONS[instruction.op](warp, instruction)
    runs = warp.predicates[instruction.predicate] != bool(instruction.predicate_negated)
    if not runs.any():
        return 0
    if runs.all():
        return OPERATIONS[instruction.op](warp, instruction)
    if instruction.op in _WHERE:
        _WHERE[instruction.op](warp, instruction, runs)
        return 0
    part = warp.part(runs)
    if instruction.op in _TOGETHER or OPERATIONS[instruction.op](part, instruction) != 0:
        raise SassFault("threads of one warp go different ways")
    warp.put_back(part, runs)
    return 0


def _load(warp: Warp, at: Instruction) -> int:
    operand = warp.read_from(warp.address(at.ra, at.offset))
    for word, (rows, places) in enumerate(_rows(warp, operand, at)):
        if at.rd != RZ:
            warp.floats[at.rd + word] = _in_register(operand.elements[rows, places], warp)
    return 0


def _in_register(elements: NDArray[np.float32], warp: Warp) -> NDArray[np.float32]:
    """What a register holds of elements in memory: themselves, or their 16 bits."""
    if warp.geometry.words.stored_bytes == FLOAT_BYTES:
        return elements
    return bits_of(elements, warp.geometry.dtype).view(np.float32)


def _multiply_add_where(warp: Warp, at: Instruction, runs: NDArray[np.bool_]) -> None:
    """What threads of a convolution leave out where their window lies in the padding."""
    floats = warp.floats
    weight = np.uint32(at.immediate).view(np.float32)
    lanes = np.flatnonzero(runs)
    floats[target_of(at.rd), lanes] = fused_multiply_add(weight, floats[at.ra, lanes], floats[at.rc, lanes])


def _load_where(warp: Warp, at: Instruction, runs: NDArray[np.bool_]) -> None:
    lanes = np.flatnonzero(runs)
    address = warp.address(at.ra, at.offset)[lanes]
    operand = warp.read_from(address)
    if at.bytes != warp.geometry.words.stored_bytes:
        raise SassFault("a load of several words that some threads leave out")
    rows, _ = warp.own_rows(operand, address, lanes)
    elements = operand.elements[rows, lanes]
    warp.floats[target_of(at.rd), lanes] = _in_register(elements, warp)


def _store(warp: Warp, at: Instruction) -> int:
    geometry = warp.geometry
    for word, (rows, places) in enumerate(_rows(warp, warp.c, at)):
        register = at.rb if at.rb == RZ else at.rb + word
        is_whole = geometry.words.stored_bytes == FLOAT_BYTES
        stored = warp.floats[register] if is_whole else values_of(warp.words[register], geometry.dtype)
        warp.c.elements[rows, places] = stored
    return 0


def _rows(warp: Warp, operand: Operand, at: Instruction) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The row that each thread addresses in a column of its own with each word of a load or store, and which column."""
    address, size = warp.address(at.ra, at.offset), warp.geometry.words.stored_bytes
    if (at.bytes < FLOAT_BYTES or size < FLOAT_BYTES) and at.bytes != size:
        raise SassFault(f"{at.bytes} bytes, where an element has {size}")
    if at.bytes > FLOAT_BYTES and (address % np.uint64(at.bytes)).any():
        raise SassFault(f"an address that is not a multiple of {at.bytes}")
    return [warp.own_rows(operand, address + np.uint64(word)) for word in range(0, at.bytes, FLOAT_BYTES)]


def _prefetch(warp: Warp, at: Instruction) -> int:
    """Fetches into a cache, which shows nowhere; only what would be loaded may be fetched."""
    _rows(warp, warp.b, at._replace(bytes=warp.geometry.words.stored_bytes))
    return 0


def _own_address(warp: Warp, at: Instruction) -> int:
    address = CODE_ADDRESS + at.offset
    warp.words[at.rd], warp.words[at.rd + 1] = address & 0xFFFFFFFF, address >> 32
    return 0


def _touch(warp: Warp, at: Instruction) -> int:
    """Loads into a cache, which shows nowhere, of what is there."""
    place = warp.address(at.ra, at.offset) - np.uint64(CODE_ADDRESS)
    if (place % np.uint64(FLOAT_BYTES)).any() or (place >= np.uint64(warp.code_bytes)).any():
        raise SassFault(f"loads code at {place.max():#x} of {warp.code_bytes:#x} bytes")
    return 0


def _check_shared(warp: Warp, at: Instruction) -> None:
    """Raises Fault where no blocks share a tile, and for shared memory beside slots."""
    if len(warp.block.cluster) == 1:
        raise SassFault(f"{Opcode(at.op).name}: a tile is given no shared memory ({len(warp.columns)} threads)")
    if at.bytes > FLOAT_BYTES:
        raise SassFault(f"{at.bytes} bytes, where a slot has {FLOAT_BYTES} for each thread")


def _kept_address(warp: Warp, at: Instruction) -> NDArray[np.uint64]:
    address: NDArray[np.uint64] = (warp.words[at.ra].astype(np.uint64) + np.uint64(at.offset % 2**64)) & WORD_MASK
    return address


def _keep(warp: Warp, at: Instruction) -> int:
    """What a thread with several columns keeps of the others."""
    if warp.geometry.walks == 1:
        return _not_a_slot(warp, at)
    warp.kept.write(_kept_address(warp, at), warp.floats[at.rb : at.rb + at.bytes // FLOAT_BYTES])
    return 0


def _not_a_slot(warp: Warp, at: Instruction) -> int:
    _check_shared(warp, at)
    raise SassFault("a slot is written by ST and read by LDS")


def _send(warp: Warp, at: Instruction) -> int:
    _check_shared(warp, at)
    warp.block.send(warp.address(at.ra, at.offset), warp.floats[at.rb].copy())
    return 0


def _collect(warp: Warp, at: Instruction) -> int:
    address = _kept_address(warp, at)
    if warp.geometry.walks > 1:
        for word, held in enumerate(warp.kept.read(address, at.bytes // FLOAT_BYTES)):
            warp.floats[at.rd + word] = held
        return 0
    _check_shared(warp, at)
    warp.floats[target_of(at.rd)] = warp.block.collect(address)
    return 0


def _not_ours(_warp: Warp, at: Instruction) -> int:
    raise SassFault(f"{Opcode(at.op).name}: no tile has barriers in shared memory")


def _fence(warp: Warp, _at: Instruction) -> int:
    warp.block.fence()
    return 0


def _arrive(warp: Warp, at: Instruction) -> int:
    _check_shared(warp, at)
    warp.block.arrive()
    return 0


def _wait(warp: Warp, at: Instruction) -> int:
    _check_shared(warp, at)
    warp.block.wait()
    return 0


def _nothing(_warp: Warp, _at: Instruction) -> int:
    return 0


def _leave(warp: Warp, _at: Instruction) -> None:
    warp.block.leave()


def _branch(_warp: Warp, at: Instruction) -> int:
    return at.offset // BYTES_PER_INSTRUCTION


OPERATIONS: Mapping[int, Callable[[Warp, Instruction], int | None]] = MappingProxyType(
    {
        **ARITHMETIC,
        Opcode.LDG: _load,
        Opcode.STG: _store,
        Opcode.LDS: _collect,
        Opcode.STS: _keep,
        Opcode.LDS_UNIFORM: _not_a_slot,
        Opcode.EXIT: _leave,
        Opcode.NOP: _nothing,
        Opcode.BAR_SYNC: _nothing,
        Opcode.BRA: _branch,
        Opcode.PREFETCH: _prefetch,
        Opcode.LEPC: _own_address,
        Opcode.TOUCH: _touch,
        Opcode.ST: _send,
        Opcode.MEMBAR: _fence,
        Opcode.ERRBAR: _nothing,
        Opcode.CGAERRBAR: _nothing,
        Opcode.CLUSTER_ARRIVE: _arrive,
        Opcode.CLUSTER_WAIT: _wait,
        Opcode.TRY_WAIT: _not_ours,
        Opcode.ARRIVE: _not_ours,
    }
)

#: What is often left out by some threads, without a copy of all that the others hold.
_WHERE: Mapping[int, Callable[[Warp, Instruction, NDArray[np.bool_]], None]] = MappingProxyType(
    {Opcode.FFMA_IMM: _multiply_add_where, Opcode.LDG: _load_where}
)

#: What all threads of a block do, or none.
_TOGETHER = frozenset((Opcode.LDS, Opcode.ST, Opcode.MEMBAR, Opcode.CLUSTER_ARRIVE, Opcode.CLUSTER_WAIT))
