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

    The product of two float32 is exact in float64; the sum is rounded to float64 before float32, which differs from a
    single rounding only where the float64 sum falls exactly between two float32 (about one case in 2^29).
    """
    return (np.float64(weight) * x.astype(np.float64) + accumulator).astype(np.float32)
