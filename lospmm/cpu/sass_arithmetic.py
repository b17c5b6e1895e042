"""Arithmetic of machine code: instructions that read and write only registers and predicates."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import cast

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.sass.form import PT, RZ, Opcode
from lospmm.cpu.fault import SassFault
from lospmm.cpu.halves import bfloat_multiply_add, bits_of, half_multiply_add, values_of
from lospmm.cpu.hazards import Instruction
from lospmm.cpu.rounding import fused_multiply_add
from lospmm.cpu.warp import NOWHERE, WORD_BITS, WORD_MASK, Warp
from lospmm.problem.dtype import DTYPES


def target_of(register: int) -> int:
    """Return the row of a warp's registers that an instruction writes to."""
    return NOWHERE if register == RZ else register


def _multiply_add_immediate(warp: Warp, at: Instruction) -> int:
    floats = warp.floats
    weight = np.uint32(at.immediate).view(np.float32)
    floats[target_of(at.rd)] = fused_multiply_add(weight, floats[at.ra], floats[at.rc])
    return 0


def multiply_add_where(warp: Warp, at: Instruction, runs: NDArray[np.bool_]) -> None:
    """Multiply and add in the threads that run: those of a convolution whose window is not in the padding."""
    floats = warp.floats
    weight = np.uint32(at.immediate).view(np.float32)
    lanes = np.flatnonzero(runs)
    floats[target_of(at.rd), lanes] = fused_multiply_add(weight, floats[at.ra, lanes], floats[at.rc, lanes])


def _multiply_add_halves(warp: Warp, at: Instruction) -> int:
    words = warp.words
    words[target_of(at.rd)] = half_multiply_add(at.immediate, words[at.ra], words[at.rc])
    return 0


def _multiply_add_bfloats(warp: Warp, at: Instruction) -> int:
    words = warp.words
    words[target_of(at.rd)] = bfloat_multiply_add(at.immediate, words[at.ra], words[at.rc])
    return 0


def _half_to_float(warp: Warp, at: Instruction) -> int:
    halves = warp.words[at.rb] >> np.uint32(16 * at.immediate)
    warp.floats[target_of(at.rd)] = values_of(halves, DTYPES["float16"])
    return 0


def _shift_left(warp: Warp, at: Instruction) -> int:
    if at.immediate >= WORD_BITS:
        raise SassFault(f"a word shifted by {at.immediate} bits")
    warp.words[target_of(at.rd)] = warp.words[at.ra] << np.uint32(at.immediate)
    return 0


def _permute(warp: Warp, at: Instruction) -> int:
    digits = [at.immediate >> 4 * place & 0xF for place in range(4)]
    if at.immediate >> 16 or max(digits) > 7:
        raise SassFault(f"bytes {at.immediate:#x} of a word and zero")
    both = np.concatenate(
        (warp.words[at.ra].view(np.uint8).reshape(-1, 4), np.zeros((len(warp.lanes), 4), np.uint8)), 1
    )
    warp.words[target_of(at.rd)] = np.ascontiguousarray(both[:, digits]).view(np.uint32)[:, 0]
    return 0


def _round_to(number: str) -> Callable[[Warp, Instruction], int]:
    def rounded(warp: Warp, at: Instruction) -> int:
        upper, lower = (bits_of(warp.floats[register], DTYPES[number]) for register in (at.ra, at.rb))
        warp.words[target_of(at.rd)] = upper << np.uint32(16) | lower
        return 0

    return rounded


def _move_immediate(warp: Warp, at: Instruction) -> int:
    warp.words[target_of(at.rd)] = at.immediate
    return 0


def _sum(warp: Warp, at: Instruction) -> NDArray[np.uint64]:
    words = warp.words
    return cast(NDArray[np.uint64], words[at.ra].astype(np.uint64) + words[at.rc] + np.uint64(at.immediate))


def _add(warp: Warp, at: Instruction) -> int:
    total = _sum(warp, at)
    warp.words[target_of(at.rd)] = total & WORD_MASK
    if at.carry != PT:
        carry = total >> WORD_BITS
        if (carry > 1).any():
            raise SassFault("the sum of three words carries 2, which one predicate does not hold")
        warp.predicates[at.carry] = carry
    return 0


def _add_with_carry(warp: Warp, at: Instruction) -> int:
    warp.words[target_of(at.rd)] = (_sum(warp, at) + warp.predicates[at.carry]) & WORD_MASK
    return 0


def _add_float(warp: Warp, at: Instruction) -> int:
    warp.floats[target_of(at.rd)] = warp.floats[at.ra] + np.uint32(at.immediate).view(np.float32)
    return 0


def _maximum(warp: Warp, at: Instruction) -> int:
    warp.floats[target_of(at.rd)] = np.maximum(warp.floats[at.rb], warp.floats[at.ra])
    return 0


def _test(warp: Warp, at: Instruction) -> int:
    """Set a predicate to whether bits are set; no register is written."""
    if at.rd != RZ or at.rc != RZ:
        raise SassFault("a test of bits that writes a register, or reads a third")
    warp.predicates[at.carry] = (warp.words[at.ra] & np.uint32(at.immediate)) != 0
    return 0


ARITHMETIC: Mapping[int, Callable[[Warp, Instruction], int]] = MappingProxyType(
    {
        Opcode.FFMA_IMM: _multiply_add_immediate,
        Opcode.HFMA2_IMM: _multiply_add_halves,
        Opcode.HFMA2_BF16_IMM: _multiply_add_bfloats,
        Opcode.HADD2_F32: _half_to_float,
        Opcode.SHF_L: _shift_left,
        Opcode.PRMT: _permute,
        Opcode.F2FP_F16: _round_to("float16"),
        Opcode.F2FP_BF16: _round_to("bfloat16"),
        Opcode.MOV_IMM: _move_immediate,
        Opcode.FADD_IMM: _add_float,
        Opcode.FMNMX_NAN: _maximum,
        Opcode.LOP3_TEST: _test,
        Opcode.IADD3: _add,
        Opcode.IADD3_X: _add_with_carry,
    }
)
