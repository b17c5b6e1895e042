"""The nonzeros of a dense array from a file, by the piece: an array may be all of a file, its nonzeros are few."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.content import PIECE_BYTES, Content, give_back
from lospmm.matrix import check_nonzeros

Array = NDArray[Any]

#: What makes numbers of a piece of an array.
Decode = Callable[[Array], Array]


def as_it_is(piece: Array) -> Array:
    return piece


def nonzeros(array: Array, content: Content, decode: Decode = as_it_is) -> tuple[tuple[NDArray[np.int64], ...], Array]:
    """Where the nonzeros of ``array`` are, an index along each axis, and their values; each (nonzeros,).

    ``array`` is one of at least one element that lies in ``content``, or beside it, by rows or by columns. Raises
    BadMatrix for more nonzeros than a kernel is emitted for, before anything is allocated for them.
    """
    order: Any = "C" if array.flags.c_contiguous else "F"
    flat = array.reshape(-1, order=order)
    count = sum(int(np.count_nonzero(piece)) for _, piece in _pieces(flat, content, decode))
    check_nonzeros(count)
    position, values = np.empty(count, np.int64), np.empty(count, decode(flat[:0]).dtype)
    filled = 0
    for start, piece in _pieces(flat, content, decode):
        at = np.flatnonzero(piece)
        end = filled + len(at)
        position[filled:end], values[filled:end] = at + start, piece[at]
        filled = end
    return np.unravel_index(position, array.shape, order=order), values


def _pieces(flat: Array, content: Content, decode: Decode) -> Iterator[tuple[int, Array]]:
    step = PIECE_BYTES // flat.itemsize
    for start in range(0, len(flat), step):
        yield start, decode(flat[start : start + step])
        give_back(content)
