"""Loads, stores and barriers of machine code; only a tile that blocks share has shared memory."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import cast

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.sass.form import RZ, Instruction, Opcode
from lospmm.cpu.geometry import CODE_ADDRESS, SassFault
from lospmm.cpu.rounding import bits_of, values_of
from lospmm.cpu.sass_arithmetic import target_of
from lospmm.cpu.warp import WORD_MASK, Warp
from lospmm.problem.dtype import FLOAT_BYTES


def _load(warp: Warp, at: Instruction) -> None:
    address = warp.address(at.ra, at.offset)
    operand = warp.read_from(address)
    elements = operand.elements[warp.own_rows(operand, address)]
    warp.floats[target_of(at.rd)] = _in_register(elements, warp)


def _in_register(elements: NDArray[np.float32], warp: Warp) -> NDArray[np.float32]:
    """Return what a register holds of elements in memory: themselves, or their 16 bits."""
    if warp.geometry.words.stored_bytes == FLOAT_BYTES:
        return elements
    return bits_of(elements, warp.geometry.dtype).view(np.float32)


def load_where(warp: Warp, at: Instruction, runs: NDArray[np.bool_]) -> None:
    """Load for the threads that run."""
    lanes = np.flatnonzero(runs)
    address = warp.address(at.ra, at.offset)[lanes]
    operand = warp.read_from(address)
    elements = operand.elements[warp.own_rows(operand, address, lanes)]
    warp.floats[target_of(at.rd), lanes] = _in_register(elements, warp)


def _store(warp: Warp, at: Instruction) -> None:
    geometry = warp.geometry
    is_whole = geometry.words.stored_bytes == FLOAT_BYTES
    stored = warp.floats[at.rb] if is_whole else values_of(warp.words[at.rb], geometry.dtype)
    warp.c.elements[warp.own_rows(warp.c, warp.address(at.ra, at.offset))] = stored


def _own_address(warp: Warp, at: Instruction) -> None:
    address = CODE_ADDRESS + at.offset
    warp.words[at.rd], warp.words[at.rd + 1] = address & 0xFFFFFFFF, address >> 32


def _touch(warp: Warp, at: Instruction) -> None:
    """Check a load of code into a cache, which has no result."""
    place = warp.address(at.ra, at.offset) - np.uint64(CODE_ADDRESS)
    if (place % np.uint64(FLOAT_BYTES)).any() or (place >= np.uint64(warp.code_bytes)).any():
        raise SassFault(f"loads code at {place.max():#x} of {warp.code_bytes:#x} bytes")


def _check_shared(warp: Warp, at: Instruction) -> None:
    """Check a use of shared memory. Raises SassFault where no blocks share a tile, or beside slots."""
    if len(warp.block.cluster) == 1:
        raise SassFault(f"{Opcode(at.op).name}: a tile is given no shared memory ({len(warp.columns)} threads)")
    if at.bytes > FLOAT_BYTES:
        raise SassFault(f"{at.bytes} bytes, where a slot has {FLOAT_BYTES} for each thread")


def _kept_address(warp: Warp, at: Instruction) -> NDArray[np.uint64]:
    address: NDArray[np.uint64] = (warp.words[at.ra].astype(np.uint64) + np.uint64(at.offset % 2**64)) & WORD_MASK
    return address


def _keep(warp: Warp, at: Instruction) -> None:
    """Store the accumulators of a thread's other columns."""
    if warp.geometry.walks == 1:
        _check_shared(warp, at)
        raise SassFault("a slot is written by STAS and read by LDS")
    warp.kept.write(_kept_address(warp, at), warp.floats[at.rb : at.rb + at.bytes // FLOAT_BYTES])


def _send(warp: Warp, at: Instruction) -> None:
    _check_shared(warp, at)
    warp.block.send(_kept_address(warp, at), warp.words[at.ra + 1], warp.floats[at.rb].copy())


def _collect(warp: Warp, at: Instruction) -> None:
    address = _kept_address(warp, at)
    if warp.geometry.walks > 1:
        for word, held in enumerate(warp.kept.read(address, at.bytes // FLOAT_BYTES)):
            warp.floats[at.rd + word] = held
        return
    _check_shared(warp, at)
    warp.floats[target_of(at.rd)] = warp.block.collect(address)


def _barrier(warp: Warp, at: Instruction) -> NDArray[np.uint32]:
    _check_shared(warp, at)
    return cast(NDArray[np.uint32], warp.words[at.ra] + np.uint32(at.offset % 2**32))


def _expect(warp: Warp, at: Instruction) -> None:
    block = warp.block
    row_bytes = block.row_bytes[np.searchsorted(block.columns, warp.columns)]
    block.expect(_barrier(warp, at), warp.words[at.rb], row_bytes)


def _await(warp: Warp, at: Instruction) -> None:
    """Wait, which a part does until it is no longer held (``Block.is_held``): then the answer is yes."""
    if at.rb != RZ:
        raise SassFault("waits for another phase than the first")
    warp.block.wait(_barrier(warp, at))
    warp.predicates[at.carry] = True


def _meet(warp: Warp, at: Instruction) -> None:
    _check_shared(warp, at)
    warp.block.has_met = True


MEMORY: Mapping[int, Callable[[Warp, Instruction], None]] = MappingProxyType(
    {
        Opcode.LDG: _load,
        Opcode.STG: _store,
        Opcode.LDS: _collect,
        Opcode.STS: _keep,
        Opcode.LEPC: _own_address,
        Opcode.TOUCH: _touch,
        Opcode.STAS: _send,
        Opcode.EXPECT: _expect,
        Opcode.AWAIT: _await,
        Opcode.CLUSTER_WAIT: _meet,
    }
)
