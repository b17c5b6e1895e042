"""The meaning of the IR in NumPy: the oracle that every emitter is held against."""

from collections.abc import Iterator
from typing import NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.ir import (
    ZERO,
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


def interpret(
    program: KernelProgram, b: NDArray[np.float32], residual: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """C (m, n) for B (k, n): every tile in turn, all columns at once. What is not written stays NaN.

    Of a convolution B is the unfolded input, with zeros for the padding; ``residual`` is (m, n).
    """
    assert (residual is not None) == program.epilogue.residual, "a residual where the kernel takes one"
    c = np.full((program.m, b.shape[1]), np.nan, dtype=np.float32)
    for first in range(0, program.block_rows, program.split_k):
        parts = [program.tiles[index] for index in program.dispatch[first : first + program.split_k]]
        mailbox = np.full((len(parts) * max(part.slots for part in parts), b.shape[1]), np.nan, dtype=np.float32)
        running = [_run(part, _Columns(b, c, mailbox, residual), program) for part in parts]
        while running:  # each up to its Exchange, then each to its end
            running = [part for part in running if next(part, False)]
    return c


class _Columns(NamedTuple):
    """What a part of a tile finds in memory, all columns of it."""

    b: NDArray[np.float32]
    c: NDArray[np.float32]
    mailbox: NDArray[np.float32]
    residual: NDArray[np.float32] | None


def _run(tile: TileProgram, columns: _Columns, program: KernelProgram) -> Iterator[bool]:
    """Execute a part; yields True where it waits for the others."""
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
    """weight * x + accumulator with one rounding to float32, as FFMA has it.

    The product of two float32 is exact in float64, but the sum is not: rounded to float64 and then to float32 it would
    be rounded twice, which goes wrong where the float64 lies halfway between two float32. Such a sum is rounded to odd
    first, and then the second rounding decides as the only one (Boldo and Melquiond, Emulation of FMA and correctly
    rounded sums: proved algorithms using rounding to odd, 2008).
    """
    product = np.float64(weight) * x.astype(np.float64)
    total = product + accumulator
    if not (total.view(np.int64) & _BELOW_HALFWAY).all():
        total = rounded_to_odd(product, accumulator.astype(np.float64), total)
    return total.astype(np.float32)


#: The bits of a float64 that are all zero halfway between two float32.
_BELOW_HALFWAY = np.int64((1 << 28) - 1)


def rounded_to_odd(a: NDArray[np.float64], b: NDArray[np.float64], total: NDArray[np.float64]) -> NDArray[np.float64]:
    """``total``, a + b rounded to nearest, or its neighbour on the other side of a + b: the one that is odd."""
    with np.errstate(invalid="ignore"):  # infinities, which are never off
        part = total - a
        error = (a - (total - part)) + (b - part)  # Knuth's TwoSum: total + error is a + b
        is_off = (np.abs(error) > 0) & (total.view(np.int64) & 1 == 0)
    return np.where(is_off, np.nextafter(total, np.copysign(np.inf, error)), total)
