"""Data types of B and C, and of the multiplication. To add a type, add a row to ``DTYPES``.

Sums are float32 or, if asked for, of a 16-bit type (``SUMS``). NumPy has no bfloat16: its elements are held as the
upper 16 bits of float32 (``uint16``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Dtype:
    """A data type; ``unit_roundoff`` (of one factor) is half the distance of two numbers next to 1."""

    name: str
    storage: str  # of an element of B and C in memory
    element_bytes: int
    unit_roundoff: float
    max_exponent: int  # of the largest power of two
    c_type: str  # of a kernel's argument
    to_storage: Callable[[NDArray[np.float32]], NDArray[Any]] = field(repr=False)
    from_storage: Callable[[NDArray[Any]], NDArray[np.float32]] = field(repr=False)

    @property
    def is_16_bit(self) -> bool:
        """Whether an element of B and C takes 16 bits."""
        return self.element_bytes == 2

    def rounded(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return ``values`` rounded as a multiplication of this type rounds them."""
        return _tf32(values) if self.name == "tf32" else self.from_storage(self.to_storage(values))

    def beyond(self, values: NDArray[np.float32]) -> float | None:
        """Return the largest of the finite ``values`` if this type rounds it to infinity, else None."""
        largest = np.abs(values[np.isfinite(values)]).max(initial=0)
        return float(largest) if np.isinf(self.rounded(np.array([largest], np.float32))[0]) else None

    def not_in_parts(self, values: NDArray[np.float32]) -> str | None:
        """Describe a value that is not the sum of its parts; None: all are.

        Such a value is so large that the first part is infinite, or so small that the second vanishes.
        """
        if self.name != "float32":
            return None
        magnitudes = np.abs(values)
        least, largest = magnitudes.min(initial=np.inf, where=magnitudes > 0), magnitudes.max(initial=0)
        if least >= LEAST_IN_PARTS and largest < BEYOND_PARTS:
            return None
        return f"{least if least < LEAST_IN_PARTS else largest:.3g} cannot be split into two TF32 numbers"


#: Of TF32 numbers: the least whose rest, down to 2^-12 of it, has all its bits above the least normal float32; and the
#: least that is rounded to infinity.
LEAST_IN_PARTS, BEYOND_PARTS = 2.0**-103, (2.0 - 2.0**-11) * 2.0**127


def _same(values: NDArray[Any]) -> NDArray[np.float32]:
    return np.ascontiguousarray(values, dtype=np.float32)


def _to_half(values: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, dtype=np.float16)


def _from_half(values: NDArray[Any]) -> NDArray[np.float32]:
    return values.astype(np.float32)


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def _from_bfloat16(values: NDArray[Any]) -> NDArray[np.float32]:
    return (values.astype(np.uint32) << 16).view(np.float32)


def _tf32(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to 10 bits of fraction, to nearest, ties away from zero, as PTX's cvt.rna.tf32.f32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(values), rounded, values)


DTYPES: Mapping[str, Dtype] = MappingProxyType(
    {
        one.name: one
        for one in (
            Dtype("float32", "float32", 4, 2.0**-24, 127, "float", _same, _same),
            Dtype("tf32", "float32", 4, 2.0**-11, 127, "float", _same, _same),
            Dtype("float16", "float16", 2, 2.0**-11, 15, "__half", _to_half, _from_half),
            Dtype("bfloat16", "bfloat16", 2, 2.0**-8, 127, "__nv_bfloat16", _to_bfloat16, _from_bfloat16),
        )
    }
)

FLOAT32 = DTYPES["float32"]

#: What sums may be rounded to: float32, or the type of B and C where that has 16 bits.
SUMS = ("float32", *(one.name for one in DTYPES.values() if one.is_16_bit))


def check_sums(dtype: str, sums: str) -> None:
    """Raise BadRequest for sums that this type of B and C does not have."""
    allowed = [name for name in SUMS if name in ("float32", dtype)]
    if sums not in allowed:
        raise BadRequest(f"sums {sums!r:.80}: with dtype {dtype} choose {' or '.join(allowed)}")


def dtype_named(name: str) -> Dtype:
    """Return the type of that name. Raises BadRequest for an unknown one."""
    if name not in DTYPES:
        raise BadRequest(f"dtype {name!r:.80}: choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


FLOAT_BYTES = 4


#: What an array is that would lose its mask.
MASKED = "a masked array: fill what is masked first, as in array.filled(0)"


def float32_of(name: str, array: Any) -> NDArray[np.float32]:
    """Return an array as float32. Raises BadRequest unless it has only real numbers in range, unmasked."""
    if isinstance(array, np.ma.MaskedArray):
        raise BadRequest(f"{name} is {MASKED}")
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub":
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise BadRequest(f"{name} is of type {kind}: give a NumPy array of real numbers")
    with np.errstate(over="ignore"):
        found = np.ascontiguousarray(array, dtype=np.float32)
    is_wider = array.dtype.kind == "f" and array.dtype.itemsize > found.itemsize  # in either byte order
    if is_wider and (np.isinf(found) & np.isfinite(array)).any():
        raise BadRequest(f"{name} holds {np.abs(array[np.isfinite(array)]).max():g}, beyond the range of float32")
    return found
