"""Multiply-adds with one rounding, as a GPU computes them: of float32, and of pairs of 16-bit numbers in words.

The lower half of a word comes first. The product of two 16-bit numbers is exact in float64. The sum and intermediate
values are rounded to odd there, so that the last rounding gives the result of a single one.
"""

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.dtype import DTYPES, Dtype

Words = NDArray[np.uint32]

_BFLOAT = DTYPES["bfloat16"]


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


def bits_of(values: NDArray[np.float32], dtype: Dtype) -> Words:
    """Return each value as a 16-bit number, rounded to nearest, in the lower half of a word."""
    with np.errstate(over="ignore"):
        return dtype.to_storage(values).view(np.uint16).astype(np.uint32)


def values_of(words: Words, dtype: Dtype) -> NDArray[np.float32]:
    """Return the numbers in the lower halves."""
    lower = words.astype(np.uint16)
    return dtype.from_storage(lower.view(dtype.to_storage(np.zeros(1, np.float32)).dtype))


#: Floating-point events that hardware ignores; a signalling NaN (0x7F81 in bfloat16) raises one when it is converted.
_silent = np.errstate(over="ignore", invalid="ignore")


@_silent
def half_multiply_add(weights: int, x: Words, accumulator: Words) -> Words:
    """Return weights * x + accumulator of pairs of float16, (threads,)."""
    factor = np.array([weights], np.uint32).view(np.float16).astype(np.float64)
    values, before = (words.copy().view(np.float16).astype(np.float64).reshape(-1, 2) for words in (x, accumulator))
    total = _sum(factor * values, before)
    return np.ascontiguousarray(total.astype(np.float16)).view(np.uint32)[:, 0]


@_silent
def bfloat_multiply_add(weights: int, x: Words, accumulator: Words) -> Words:
    """Return weights * x + accumulator of pairs of bfloat16, (threads,)."""
    factor, values, before = map(_from_bfloats, (np.array([weights], np.uint32), x, accumulator))
    total = _sum(factor * values, before)
    single = total.astype(np.float32)
    words = single.view(np.uint32)
    off = (single.astype(np.float64) != total) & (words & 1 == 0) & np.isfinite(single)
    towards = np.where(total > single, np.float32(np.inf), np.float32(-np.inf))
    single = np.where(off, np.nextafter(single, towards), single)
    return np.ascontiguousarray(_BFLOAT.to_storage(single)).view(np.uint32)[:, 0]


def _from_bfloats(words: Words) -> NDArray[np.float64]:
    """Return both numbers of each word, (words, 2)."""
    pairs = np.stack((words << np.uint32(16), words & np.uint32(0xFFFF0000)), axis=1)
    return np.ascontiguousarray(pairs).view(np.float32).astype(np.float64)


def _sum(product: NDArray[np.float64], before: NDArray[np.float64]) -> NDArray[np.float64]:
    return rounded_to_odd(product, before, product + before)
