"""Machine code as a table, one row per instruction: written by the scheduler, read by ``encode``.

A row holds an instruction's operands and control fields. Control fields tell the hardware how long to wait before the
next instruction, and which scoreboards signal a result. A row starts as a ``blank`` row; only the instruction's own
fields may then be set, which ``encode`` checks. NVIDIA publishes no description of these bits: names are those that
nvdisasm prints, the control fields those of Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via
Microbenchmarking" (2018), section 2.1.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Opcode(IntEnum):
    """Instructions. A register R255 reads as zero and discards writes; a predicate P7 reads as true."""

    FFMA_IMM = 0  # rd = ra * immediate + rc, the immediate a float32's bits
    LDG = 1  # rd... = global[ra:ra+1 + offset], read-only data; ur: pair of uniform registers with the descriptor
    STG = 2  # global[ra:ra+1 + offset] = rb...; ur as for LDG
    LDS = 3  # rd... = shared[ra + offset]
    STS = 4  # shared[ra + offset] = rb...
    MOV_IMM = 5  # rd = immediate
    IADD3 = 6  # rd = ra + immediate + rc; carry = the sum's carry out (P7: not kept)
    IADD3_X = 7  # rd = ra + immediate + rc + the predicate carry
    EXIT = 8
    NOP = 9
    BRA = 10  # to offset bytes after the end of this instruction
    STAS = 11  # shared[ra + offset] = rb... in any block of the cluster; tells the barrier at shared[ra+1] of the bytes
    EXPECT = 12  # arrives at the barrier at shared[ra + offset], which then opens when rb bytes have come
    AWAIT = 13  # predicate carry = whether the barrier at shared[ra + offset] is past the phase of parity rb; may wait
    CLUSTER_WAIT = 14  # until every warp of the cluster, but those that have left, has arrived
    FADD_IMM = 15  # rd = ra + immediate, a float32's bits
    FMNMX_NAN = 16  # rd = the larger of ra and rb, NaN where one is
    LOP3_TEST = 17  # the predicate carry = whether ra and immediate have a bit in common
    HFMA2_IMM = 18  # rd = ra * immediate + rc, each a pair of float16, the lower half of a register first
    HFMA2_BF16_IMM = 19  # pairs of bfloat16
    HADD2_F32 = 20  # rd = the float32 of a float16: of the lower half of rb, or where immediate is 1 the upper
    SHF_L = 21  # rd = ra shifted left by immediate bits
    F2FP_F16 = 22  # rd = a pair of float16, each to the nearest: rb's in the lower half, ra's in the upper
    F2FP_BF16 = 23  # of bfloat16
    PRMT = 24  # rd = four bytes, each that of ra, 0 to 3, or zero, 4 to 7, which a digit of immediate names
    LEPC = 25  # rd:rd+1 = the address of this instruction
    TOUCH = 26  # loads a word of global[ra:ra+1 + offset] that goes nowhere: its sector into L2; ur as for LDG


RZ = 255
PT = 7  # the predicate that is always true
NO_BARRIER = 7


class Instruction(NamedTuple):
    """One instruction, field by field."""

    op: int
    rd: int
    ra: int
    rb: int
    rc: int
    ur: int  # uniform register
    bytes: int  # 2, 4, 8 or 16 of a load or store: 2 are the lower half of a register, the upper is zero
    carry: int  # predicate that a carry goes to or comes from
    immediate: int
    offset: int  # bytes: 24 bits with a sign of a load or store; a branch's distance
    predicate: int  # the instruction runs where this predicate is true ...
    predicate_negated: int  # ... or, with 1, where it is false
    stall: int  # cycles before the warp's next instruction may issue: 1 to 11; with yields 0 to 15
    yields: int  # 1: the scheduler is asked to turn to another warp; bit 109, which is 0 then
    write_barrier: int  # scoreboard that falls when rd is written, 0 to 5; 7: none
    read_barrier: int  # scoreboard that falls when the operands were read, 0 to 5; 7: none
    wait: int  # mask of the scoreboards that must be down before issue
    reuse: int  # operands kept in the reuse cache: bit 0 ra, bit 1 rb, bit 2 rc; not with yields


#: Instructions as rows, of 24 bytes each.
FORM = np.dtype([(name, {"immediate": "<u4", "offset": "<i4"}.get(name, "u1")) for name in Instruction._fields])

_BLANK = np.zeros((), FORM)
for _field, _value in {
    **dict.fromkeys(("rd", "ra", "rb", "rc"), RZ),
    **dict.fromkeys(("carry", "predicate"), PT),
    **dict.fromkeys(("write_barrier", "read_barrier"), NO_BARRIER),
    "stall": 1,
}.items():
    _BLANK[_field] = _value


def blank(count: int) -> NDArray[np.void]:
    """Return ``count`` rows of FORM without operands: R255, P7, no barriers, a stall of 1 cycle."""
    return np.full(count, _BLANK)


def joined(parts: Sequence[NDArray[np.void]]) -> NDArray[np.void]:
    """Concatenate rows of FORM, faster than ``np.concatenate``, which compares the fields of all parts."""
    form = np.empty(sum(map(len, parts)), FORM)
    at = 0
    for part in parts:
        form[at : at + len(part)] = part
        at += len(part)
    return form
