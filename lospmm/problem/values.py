"""8-bit values of A: a code for each nonzero, and a scale for each row. To add a type, add a row to ``VALUE_TYPES``.

A weight w is stored as the code nearest to w / scale, where scale is the largest magnitude of its row over the largest
code. Kernels multiply by the codes, in float16 without rounding, and then the float32 sums by the scale.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class SparseRows(Protocol):
    """A matrix by rows, a ``SparseMatrix``."""

    def __hash__(self) -> int: ...

    @property
    def data(self) -> NDArray[np.float32]:
        """The nonzeros."""
        ...

    @property
    def indptr(self) -> NDArray[Any]:
        """Where each row begins, and the number of nonzeros, (m + 1,)."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ValueType:
    """Codes of 8 bits: ``decoded`` has the value of each, (256,), NaN where it is none.

    A weight differs from what is held by at most ``rounding`` of itself and ``floor`` of its row's largest.
    """

    name: str
    zero: int  # the code of 0
    largest: float
    least_arch: int  # that converts codes to float16
    rounding: float
    floor: float
    decoded: NDArray[np.float32] = field(repr=False)
    nearest: Callable[[NDArray[np.float32]], NDArray[np.float32]] = field(repr=False)  # of two as near the even code

    def scales(self, matrix: SparseRows) -> NDArray[np.float32]:
        """Return the scale of each row, (m,); 0 of a row of zeros."""
        largest = np.zeros(len(matrix.indptr) - 1, dtype=np.float32)
        np.maximum.at(largest, _rows(matrix), np.abs(matrix.data))
        return largest / np.float32(self.largest)

    def codes(self, matrix: SparseRows) -> NDArray[np.uint8]:
        """Return the code of each nonzero: the nearest, of two as near the even one."""
        return _codes(self, matrix)

    def codes_of(self, values: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Return the codes of numbers that have one, of others that of 0."""
        found: NDArray[np.uint8] = _code_by_bits(self)[values.astype(np.float16).view(np.uint16)]
        return found

    def held(self, matrix: SparseRows) -> NDArray[np.float32]:
        """Return the weights that the codes stand for."""
        return self.decoded[self.codes(matrix)] * self.scales(matrix)[_rows(matrix)]


@lru_cache(maxsize=2)
def _codes(values: ValueType, matrix: SparseRows) -> NDArray[np.uint8]:
    scale = values.scales(matrix)[_rows(matrix)]
    scaled = np.divide(matrix.data, scale, out=np.zeros_like(matrix.data), where=scale > 0)
    return values.codes_of(values.nearest(scaled))


@cache
def _code_by_bits(values: ValueType) -> NDArray[np.uint8]:
    """Return the code of each number of float16, by its bits; every code is such a number."""
    found = np.full(1 << 16, values.zero, dtype=np.uint8)
    codes = np.flatnonzero(values.decoded)  # of both zeros the code is that of 0
    codes = codes[np.isfinite(values.decoded[codes])]
    found[values.decoded[codes].astype(np.float16).view(np.uint16)] = codes
    return found


def _rows(matrix: SparseRows) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(matrix.indptr) - 1), np.diff(matrix.indptr))


def _e4m3() -> NDArray[np.float32]:
    """Return the numbers of E4M3 (Micikevicius et al., FP8 Formats for Deep Learning, 2022): no infinity, one NaN."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    magnitude[code & 127 == 127] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


def _nearest_e4m3(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to multiples of an eighth of a number's power of two, which is 2^-6 or more."""
    step = np.ldexp(np.float32(1), np.maximum(np.frexp(values)[1] - 1, -6) - 3)
    rounded: NDArray[np.float32] = np.rint(values / step) * step
    return rounded


def _int8() -> NDArray[np.float32]:
    """Return code - 128, without -128."""
    found = np.arange(256, dtype=np.float32) - 128
    found[0] = np.nan
    return found


VALUE_TYPES: Mapping[str, ValueType] = MappingProxyType(
    {
        "int8": ValueType("int8", 128, 127.0, 80, 0.0, 0.5 / 127, _int8(), np.rint),
        "fp8_e4m3": ValueType("fp8_e4m3", 0, 448.0, 89, 2.0**-4, 2.0**-10 / 448, _e4m3(), _nearest_e4m3),
    }
)


def pair_bytes(values: ValueType | None) -> int:
    """Return the bytes of two values."""
    return 4 if values is None else 2
