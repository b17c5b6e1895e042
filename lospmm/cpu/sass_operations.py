"""What the instructions of machine code do: arithmetic, then loads, stores and barriers.

Only a tile that blocks share, or whose code runs twice, has shared memory.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import cast

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.sass.form import PT, RZ, Instruction, Opcode
from lospmm.cpu.geometry import CODE_ADDRESS, SassFault
from lospmm.cpu.rounding import Words, bfloat_multiply_add, bits_of, fused_multiply_add, half_multiply_add, values_of
from lospmm.cpu.warp import NOWHERE, WORD_BITS, WORD_MASK, Warp
from lospmm.problem.dtype import DTYPES, FLOAT_BYTES


def target_of(register: int) -> int:
    """Return the row of a warp's registers that an instruction writes to."""
    return NOWHERE if register == RZ else register


def _immediate(at: Instruction) -> np.float32:
    return np.uint32(at.immediate).view(np.float32)


def multiply_add_where(warp: Warp, at: Instruction, runs: NDArray[np.bool_]) -> None:
    """Multiply and add in the threads that run: those of a convolution whose window is not in the padding."""
    floats, lanes = warp.floats, np.flatnonzero(runs)
    found = fused_multiply_add(_immediate(at), floats[at.ra, lanes], floats[at.rc, lanes])
    floats[target_of(at.rd), lanes] = found


def _shifted(words: Words, at: Instruction) -> Words:
    if at.immediate >= WORD_BITS:
        raise SassFault(f"a word shifted by {at.immediate} bits")
    return cast(Words, words[at.ra] << np.uint32(at.immediate))


def _permuted(words: Words, at: Instruction) -> Words:
    digits = [at.immediate >> 4 * place & 0xF for place in range(4)]
    if at.immediate >> 16 or max(digits) > 7:
        raise SassFault(f"bytes {at.immediate:#x} of a word and zero")
    own = words[at.ra].view(np.uint8).reshape(-1, 4)
    both = np.concatenate((own, np.zeros_like(own)), 1)
    return np.ascontiguousarray(both[:, digits]).view(np.uint32)[:, 0]


def _rounded_pair(dtype: str) -> Callable[[Words, Instruction], Words]:
    def rounded(words: Words, at: Instruction) -> Words:
        upper, lower = (bits_of(words[register].view(np.float32), DTYPES[dtype]) for register in (at.ra, at.rb))
        return upper << np.uint32(16) | lower

    return rounded


def _sum(warp: Warp, at: Instruction) -> NDArray[np.uint64]:
    words = warp.words
    return cast(NDArray[np.uint64], words[at.ra].astype(np.uint64) + words[at.rc] + np.uint64(at.immediate))


def _add(warp: Warp, at: Instruction) -> None:
    total = _sum(warp, at)
    warp.words[target_of(at.rd)] = total & WORD_MASK
    if at.carry != PT:
        carry = total >> WORD_BITS
        if (carry > 1).any():
            raise SassFault("the sum of three words carries 2, which one predicate does not hold")
        warp.predicates[at.carry] = carry


def _add_with_carry(warp: Warp, at: Instruction) -> None:
    warp.words[target_of(at.rd)] = (_sum(warp, at) + warp.predicates[at.carry]) & WORD_MASK


def _test(warp: Warp, at: Instruction) -> None:
    """Set a predicate to whether bits are set; no register is written."""
    if at.rd != RZ or at.rc != RZ:
        raise SassFault("a test of bits that writes a register, or reads a third")
    warp.predicates[at.carry] = (warp.words[at.ra] & np.uint32(at.immediate)) != 0


#: What an instruction leaves in its register, of all registers as float32.
_FLOATS: Mapping[int, Callable[[NDArray[np.float32], Instruction], NDArray[np.float32]]] = MappingProxyType(
    {
        Opcode.FFMA_IMM: lambda floats, at: fused_multiply_add(_immediate(at), floats[at.ra], floats[at.rc]),
        Opcode.FADD_IMM: lambda floats, at: floats[at.ra] + _immediate(at),
        Opcode.FMNMX_NAN: lambda floats, at: np.maximum(floats[at.rb], floats[at.ra]),
    }
)

#: The same of all registers as words.
_WORDS: Mapping[int, Callable[[Words, Instruction], Words | np.uint32]] = MappingProxyType(
    {
        Opcode.HFMA2_IMM: lambda words, at: half_multiply_add(at.immediate, words[at.ra], words[at.rc]),
        Opcode.HFMA2_BF16_IMM: lambda words, at: bfloat_multiply_add(at.immediate, words[at.ra], words[at.rc]),
        Opcode.HADD2_F32: lambda words, at: values_of(
            words[at.rb] >> np.uint32(16 * at.immediate), DTYPES["float16"]
        ).view(np.uint32),
        Opcode.SHF_L: _shifted,
        Opcode.PRMT: _permuted,
        Opcode.F2FP_F16: _rounded_pair("float16"),
        Opcode.F2FP_BF16: _rounded_pair("bfloat16"),
        Opcode.MOV_IMM: lambda _, at: np.uint32(at.immediate),
    }
)


def _compute(warp: Warp, at: Instruction) -> None:
    if at.op in _FLOATS:
        warp.floats[target_of(at.rd)] = _FLOATS[at.op](warp.floats, at)
    else:
        warp.words[target_of(at.rd)] = _WORDS[at.op](warp.words, at)


def load(warp: Warp, at: Instruction, runs: NDArray[np.bool_] | None = None) -> None:
    """Load for all threads, or those that run."""
    lanes = slice(None) if runs is None else np.flatnonzero(runs)
    address = warp.address(at.ra, at.offset)[lanes]
    operand = warp.read_from(address)
    elements = operand.elements[warp.own_rows(operand, address, lanes)]
    warp.floats[target_of(at.rd), lanes] = _in_register(elements, warp)


def _in_register(elements: NDArray[np.float32], warp: Warp) -> NDArray[np.float32]:
    """Return what a register holds of elements in memory: themselves, or their 16 bits."""
    if warp.geometry.words.stored_bytes == FLOAT_BYTES:
        return elements
    return bits_of(elements, warp.geometry.dtype).view(np.float32)


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


#: What each instruction does, but those that only take time or lead elsewhere.
OPERATIONS: Mapping[int, Callable[[Warp, Instruction], None]] = MappingProxyType(
    {
        **dict.fromkeys((*_FLOATS, *_WORDS), _compute),
        Opcode.LOP3_TEST: _test,
        Opcode.IADD3: _add,
        Opcode.IADD3_X: _add_with_carry,
        Opcode.LDG: load,
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
