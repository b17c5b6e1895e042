"""The meaning of the IR in NumPy: the oracle that every emitter is held against."""

from collections.abc import Iterator
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from lospmm.ir import ZERO, Collect, Exchange, Fma, KernelProgram, Load, Send, Store, TileProgram, instructions


def interpret(program: KernelProgram, b: NDArray[np.float32]) -> NDArray[np.float32]:
    """C (m, n) for B (k, n): every tile in turn, all columns at once. What is not written stays NaN."""
    c = np.full((program.m, b.shape[1]), np.nan, dtype=np.float32)
    for first in range(0, program.block_rows, program.split_k):
        parts = [program.tiles[index] for index in program.dispatch[first : first + program.split_k]]
        mailbox = np.full((len(parts) * max(part.slots for part in parts), b.shape[1]), np.nan, dtype=np.float32)
        running = [_run(part, b, c, mailbox) for part in parts]
        while running:  # each up to its Exchange, then each to its end
            running = [part for part in running if next(part, False)]
    return c


def _run(
    tile: TileProgram, b: NDArray[np.float32], c: NDArray[np.float32], mailbox: NDArray[np.float32]
) -> Iterator[bool]:
    """Execute a part; yields True where it waits for the others."""
    accumulators = np.zeros((tile.accumulators, b.shape[1]), dtype=np.float32)
    buffers = np.full((tile.buffers, b.shape[1]), np.nan, dtype=np.float32)
    for instruction in instructions(tile):
        match instruction:
            case Load(buffer, k):
                buffers[buffer] = b[k]
            case Fma(accumulator, buffer, weight):
                accumulators[accumulator] = fused_multiply_add(weight, buffers[buffer], accumulators[accumulator])
            case Store(row, accumulator):
                c[row] = 0 if accumulator == ZERO else accumulators[accumulator]
            case Send(slot, accumulator):
                mailbox[slot] = accumulators[accumulator]
            case Exchange():
                yield True
            case Collect(buffer, slot):
                buffers[buffer] = mailbox[slot]
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
        total = _rounded_to_odd(product, accumulator.astype(np.float64), total)
    return total.astype(np.float32)


#: The bits of a float64 that are all zero halfway between two float32.
_BELOW_HALFWAY = np.int64((1 << 28) - 1)


def _rounded_to_odd(a: NDArray[np.float64], b: NDArray[np.float64], total: NDArray[np.float64]) -> NDArray[np.float64]:
    """``total``, a + b rounded to nearest, or its neighbour on the other side of a + b: the one that is odd."""
    with np.errstate(invalid="ignore"):  # infinities, which are never off
        part = total - a
        error = (a - (total - part)) + (b - part)  # Knuth's TwoSum: total + error is a + b
        is_off = (np.abs(error) > 0) & (total.view(np.int64) & 1 == 0)
    return np.where(is_off, np.nextafter(total, np.copysign(np.inf, error)), total)
