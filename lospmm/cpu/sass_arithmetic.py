"""Arithmetic of machine code: instructions that read and write only registers and predicates."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import cast

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.sass.form import PT, RZ, Instruction, Opcode
from lospmm.cpu.geometry import SassFault
from lospmm.cpu.rounding import Words, bfloat_multiply_add, bits_of, fused_multiply_add, half_multiply_add, values_of
from lospmm.cpu.warp import NOWHERE, WORD_BITS, WORD_MASK, Warp
from lospmm.problem.dtype import DTYPES


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


ARITHMETIC: Mapping[int, Callable[[Warp, Instruction], None]] = MappingProxyType(
    {
        **dict.fromkeys((*_FLOATS, *_WORDS), _compute),
        Opcode.LOP3_TEST: _test,
        Opcode.IADD3: _add,
        Opcode.IADD3_X: _add_with_carry,
    }
)
