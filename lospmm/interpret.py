"""The meaning of the IR in NumPy: the oracle that every emitter is held against."""

from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from lospmm.ir import ZERO, Fma, KernelProgram, Load, Store, instructions


def interpret(program: KernelProgram, b: NDArray[np.float32]) -> NDArray[np.float32]:
    """C (m, n) for B (k, n): every block row in turn, all columns at once. What is not written stays NaN."""
    c = np.full((program.m, b.shape[1]), np.nan, dtype=np.float32)
    for index in program.dispatch:
        tile = program.tiles[index]
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
                case _:
                    assert_never(instruction)
    return c


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
