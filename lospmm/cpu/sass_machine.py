"""Machine code on a CPU: all chosen threads at once, each register a NumPy vector over threads.

A tile's code is run from its first instruction to its EXIT, as one warp, and checked by ``Hazards`` on the way: code
that passes computes the same on a GPU, whatever the memory latency. The code before the tiles (``prologue``) is not
run: threads without a column have left, the others find their addresses in the registers of ``Entry``. The parts of a
tile that several blocks share run in turn, each until it has to wait for the others (``Block``).

The meaning of each instruction is a function in ``OPERATIONS``.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.emission import Emission
from lospmm.codegen.sass.fields import Generation, encode
from lospmm.codegen.sass.form import PT, Instruction, Opcode
from lospmm.codegen.sass.generations import generation_of
from lospmm.codegen.sass.listing import BYTES_PER_INSTRUCTION, text
from lospmm.codegen.sass.machine import MachineCode
from lospmm.cpu.geometry import Geometry, Run, SassFault
from lospmm.cpu.hazards import Hazard, Hazards, instructions
from lospmm.cpu.sass_operations import OPERATIONS, load, multiply_add_where
from lospmm.cpu.warp import Warp, warps_at_entry
from lospmm.errors import ToolchainFault, VerificationFailed

#: A tile that issues more instructions than this many times its length counts as endless.
LOOP_LIMIT = 16


def execute(code: MachineCode, asked: Run) -> NDArray[np.float32]:
    """Return C (m, columns) of machine code, as a row of ``RUNTIMES`` does for an emission.

    Raises VerificationFailed for a hazard, an address that is not the thread's own, an element of another block that
    may not be there, code that cannot be encoded, and code that does not end.
    """
    generation, geometry, residual = generation_of(code.arch), asked.geometry, asked.residual
    try:
        encode(code.form, generation)
    except ToolchainFault as fault:
        raise VerificationFailed(f"machine code: {fault}") from None
    _check_global(code, geometry.words.stored_bytes, generation)
    parts, size = code.split_k, BYTES_PER_INSTRUCTION * len(code.form)
    if len(code.dispatch) % parts:
        raise VerificationFailed(f"machine code: {len(code.dispatch)} block rows are not tiles of {parts} parts each")
    c = np.full((geometry.m, len(asked.columns)), np.nan, dtype=np.float32)
    own_columns, own = _threads_of(geometry, asked.columns)
    own_b, own_c = asked.b[:, own], c[:, own]
    third = None if residual is None else residual[:, own]
    # A sum beyond float32 is infinite, on a GPU as here; it is not worth a warning.
    with np.errstate(over="ignore", invalid="ignore"):
        every = zip(*(code.dispatch[part::parts] for part in range(parts)), strict=True)
        tiles = tuple(dict.fromkeys(every))  # equal tiles store the same
        for done, tile in enumerate(tiles):
            asked.progress(done, len(tiles))
            warps = warps_at_entry(parts, code.entry, geometry, own_columns, own_b, own_c, size, third)
            running = [_run_part(code, part, warp, generation) for part, warp in zip(tile, warps, strict=True)]
            while running:  # each runs until it has to wait
                running = [part for part in running if next(part, False)]
    c[:, own] = own_c
    return c


def _threads_of(geometry: Geometry, columns: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each thread's first column, and the indices in ``columns`` of all its columns, walk by walk.

    All columns of a thread with several must be there.
    """
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


def execute_emission(emission: Emission, asked: Run) -> NDArray[np.float32]:
    """Run an emission of machine code, as a row of ``RUNTIMES``. Raises as ``execute``."""
    assert emission.machine is not None, "an emission in this language holds machine code"
    return execute(emission.machine, asked)


def _check_global(code: MachineCode, size: int, generation: Generation) -> None:
    """Check that loads and stores are of an element, and name the uniform register that the prologue fills."""
    form, entry = code.form, code.entry
    is_global = np.isin(form["op"], (Opcode.LDG, Opcode.STG))
    wrong = np.flatnonzero(is_global & ((form["ur"] != entry.descriptor) | (form["bytes"] != size)))
    if len(wrong):
        number = int(wrong[0])
        tile = int(np.searchsorted(code.starts, number, side="right")) - 1
        reason = f"UR{form['ur'][number]} does not hold the descriptor, UR{entry.descriptor} does"
        if form["bytes"][number] != size:
            reason = f"{form['bytes'][number]} bytes, where an element has {size}"
        raise _refusal(code, tile, number, reason, generation)


def _run_part(code: MachineCode, tile: int, warp: Warp, generation: Generation) -> Iterator[bool]:
    """Execute a tile, or a block's part of one; yield True while it waits for the other parts."""
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
            while instruction.op == Opcode.AWAIT and warp.block.is_held:
                yield True
        except (Hazard, SassFault) as why:
            raise _refusal(code, tile, first + index, str(why), generation) from None
        if distance is None:
            return
        index += 1 + distance
    reason = f"the tile has not ended after {LOOP_LIMIT} times its {len(body)} instructions"
    raise _refusal(code, tile, first + last, reason, generation)


def _refusal(code: MachineCode, tile: int, number: int, reason: str, generation: Generation) -> VerificationFailed:
    quoted = "".join(text(code.form[number : number + 1], generation))
    place = f"instruction {number} (at {number * BYTES_PER_INSTRUCTION:#x})"
    return VerificationFailed(f"machine code: tile {tile}, {place}, {quoted}: {reason}")


def _step(warp: Warp, instruction: Instruction) -> int | None:
    """Execute an instruction; return how many to skip, or None if the threads leave."""
    if instruction.predicate == PT and not instruction.predicate_negated:
        return _execute(warp, instruction)
    runs = warp.predicates[instruction.predicate] != bool(instruction.predicate_negated)
    if not runs.any():
        return 0
    if runs.all():
        return _execute(warp, instruction)
    if instruction.op in _WHERE:
        _WHERE[instruction.op](warp, instruction, runs)
        return 0
    if instruction.op in _TOGETHER:
        raise SassFault("threads of one warp go different ways")
    part = warp.part(runs)
    _execute(part, instruction)
    warp.put_back(part, runs)
    return 0


def _execute(warp: Warp, at: Instruction) -> int | None:
    if at.op == Opcode.EXIT:
        warp.block.leave()
        return None
    if at.op not in _WITHOUT_RESULT:
        OPERATIONS[at.op](warp, at)
    return at.offset // BYTES_PER_INSTRUCTION if at.op == Opcode.BRA else 0


#: Instructions that only take time, or lead elsewhere.
_WITHOUT_RESULT = frozenset((Opcode.NOP, Opcode.BRA))

#: Instructions that some threads often skip, executed without copying the state of the others.
_WHERE: Mapping[int, Callable[[Warp, Instruction, NDArray[np.bool_]], None]] = MappingProxyType(
    {Opcode.FFMA_IMM: multiply_add_where, Opcode.LDG: load}
)

#: Instructions that all threads of a block execute, or none.
_TOGETHER = frozenset((Opcode.LDS, Opcode.STAS, Opcode.AWAIT, Opcode.CLUSTER_WAIT, Opcode.BRA, Opcode.EXIT))
