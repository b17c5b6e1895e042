"""The meaning of the IR in NumPy: the reference of every emitter."""

from collections.abc import Iterator
from typing import NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.ir import (
    Add,
    Begin,
    Collect,
    Exchange,
    Fma,
    Fold,
    KernelProgram,
    LoadRow,
    Residual,
    Send,
    StoreRow,
    TileProgram,
    instructions,
)
from lospmm.codegen.ops import ZERO


def interpret(
    program: KernelProgram, b: NDArray[np.float32], residual: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Return C (m, n) for B (k, n), computed tile by tile. Elements that no tile writes are NaN.

    For a convolution B is the unfolded input, with zeros for the padding; ``residual`` is (m, n).
    """
    assert (residual is not None) == program.epilogue.residual, "a residual where the kernel takes one"
    c = np.full((program.m, b.shape[1]), np.nan, dtype=np.float32)
    for first in range(0, program.block_rows, program.split_k):
        parts = [program.tiles[index] for index in program.dispatch[first : first + program.split_k]]
        mailbox = np.full((len(parts) * max(part.slots for part in parts), b.shape[1]), np.nan, dtype=np.float32)
        running = [_run(part, _Columns(b, c, mailbox, residual), program) for part in parts]
        while running:  # all parts up to their Exchange, then all to their end
            running = [part for part in running if next(part, False)]
    return c


class _Columns(NamedTuple):
    """The memory of one part of a tile: all columns of its operands."""

    b: NDArray[np.float32]
    c: NDArray[np.float32]
    mailbox: NDArray[np.float32]
    residual: NDArray[np.float32] | None


def _run(tile: TileProgram, columns: _Columns, program: KernelProgram) -> Iterator[bool]:
    """Execute a part; yield at its Exchange, where it waits for the others."""
    b, c, mailbox, residual = columns
    accumulators = np.zeros((tile.accumulators, b.shape[1]), dtype=np.float32)
    buffers = np.full((tile.buffers, b.shape[1]), np.nan, dtype=np.float32)
    for instruction in instructions(tile):
        match instruction:
            case LoadRow(buffer, k):
                buffers[buffer] = b[k]
            case Fma(accumulator, buffer, weight):
                accumulators[accumulator] = fused_multiply_add(weight, buffers[buffer], accumulators[accumulator])
            case StoreRow(row, accumulator):
                total = np.zeros(b.shape[1], np.float32) if accumulator == ZERO else accumulators[accumulator]
                c[row] = np.maximum(total, 0) if program.epilogue.relu else total
            case Send(slot, accumulator):
                mailbox[slot] = accumulators[accumulator]
            case Exchange():
                yield True
            case Collect(buffer, slot):
                buffers[buffer] = mailbox[slot]
            case Begin(accumulator, weight):
                accumulators[accumulator] = weight
            case Residual(accumulator, row):
                assert residual is not None
                accumulators[accumulator] = residual[row]
            case Add(accumulator, weight):
                accumulators[accumulator] += weight
            case Fold(accumulator, second):
                accumulators[accumulator] += accumulators[second]
                accumulators[second] = 0
            case _:
                assert_never(instruction)


def fused_multiply_add(
    weight: np.float32, x: NDArray[np.float32], accumulator: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return weight * x + accumulator with one rounding to float32, as FFMA does.

    The product of two float32 is exact in float64, but the sum is not: rounded to float64 and then to float32 it
    would be rounded twice, which goes wrong if the float64 lies halfway between two float32. Such a sum is first
    rounded to odd; the second rounding then gives the result of a single one (Boldo and Melquiond, Emulation of FMA
    and correctly rounded sums: proved algorithms using rounding to odd, 2008).
    """
    product = np.float64(weight) * x.astype(np.float64)
    total = product + accumulator
    if not (total.view(np.int64) & _BELOW_HALFWAY).all():
        total = rounded_to_odd(product, accumulator.astype(np.float64), total)
    return total.astype(np.float32)


#: The bits of a float64 that are all zero halfway between two float32.
_BELOW_HALFWAY = np.int64((1 << 28) - 1)


def rounded_to_odd(a: NDArray[np.float64], b: NDArray[np.float64], total: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a + b rounded to odd, given ``total``, their sum rounded to nearest."""
    with np.errstate(invalid="ignore"):  # infinities, which need no correction
        part = total - a
        error = (a - (total - part)) + (b - part)  # Knuth's TwoSum: total + error is a + b
        is_off = (np.abs(error) > 0) & (total.view(np.int64) & 1 == 0)
    return np.where(is_off, np.nextafter(total, np.copysign(np.inf, error)), total)
