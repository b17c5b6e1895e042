"""Multiply-adds with one rounding, as a GPU computes them."""

import numpy as np
from numpy.typing import NDArray


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
