"""8-bit values of A: a code for each nonzero, and a scale for each row. To add a type, add a row to ``VALUE_TYPES``.

A weight w is stored as the code nearest to w / scale, where scale is the largest magnitude of its row over the largest
code. Kernels multiply by the codes, in float16 without rounding, and then the float32 sums by the scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
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

    def scales(self, matrix: SparseRows) -> NDArray[np.float32]:
        """Return the scale of each row, (m,); 0 of a row of zeros."""
        largest = np.zeros(len(matrix.indptr) - 1, dtype=np.float32)
        np.maximum.at(largest, _rows(matrix), np.abs(matrix.data))
        return largest / np.float32(self.largest)

    def codes(self, matrix: SparseRows) -> NDArray[np.uint8]:
        """Return the code of each nonzero: the nearest, of two as near the even one."""
        return _codes(self, matrix)

    def held(self, matrix: SparseRows) -> NDArray[np.float32]:
        """Return the weights that the codes stand for."""
        return self.decoded[self.codes(matrix)] * self.scales(matrix)[_rows(matrix)]


@lru_cache(maxsize=2)
def _codes(values: ValueType, matrix: SparseRows) -> NDArray[np.uint8]:
    scale = values.scales(matrix)[_rows(matrix)]
    scaled = np.divide(matrix.data, scale, out=np.zeros_like(matrix.data), where=scale > 0)
    order = np.argsort(values.decoded, kind="stable")[: np.isfinite(values.decoded).sum()]
    order = order[np.append(True, np.diff(values.decoded[order]) > 0)]  # one zero
    known = values.decoded[order].astype(np.float64)
    above = np.clip(np.searchsorted(known, scaled), 1, len(known) - 1)
    up, down = known[above] - scaled, scaled - known[above - 1]
    takes_up = (up < down) | ((up == down) & (order[above] % 2 == 0))
    codes: NDArray[np.uint8] = order[np.where(takes_up, above, above - 1)].astype(np.uint8)
    return codes


def _rows(matrix: SparseRows) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(matrix.indptr) - 1), np.diff(matrix.indptr))


def _e4m3() -> NDArray[np.float32]:
    """Return the numbers of E4M3 (Micikevicius et al., FP8 Formats for Deep Learning, 2022): no infinity, one NaN."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    magnitude[code & 127 == 127] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


def _int8() -> NDArray[np.float32]:
    """Return code - 128, without -128."""
    found = np.arange(256, dtype=np.float32) - 128
    found[0] = np.nan
    return found


VALUE_TYPES: Mapping[str, ValueType] = MappingProxyType(
    {
        "int8": ValueType("int8", 128, 127.0, 80, 0.0, 0.5 / 127, _int8()),
        "fp8_e4m3": ValueType("fp8_e4m3", 0, 448.0, 89, 2.0**-4, 2.0**-10 / 448, _e4m3()),
    }
)


def pair_bytes(values: ValueType | None) -> int:
    """Return the bytes of two values."""
    return 4 if values is None else 2
