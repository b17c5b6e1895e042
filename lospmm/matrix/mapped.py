"""The bytes of a matrix file: in memory, or mapped from a file of this process's own, so that they need not be.

What is read of a mapped file counts as memory of this process until it is given back; it is then still in the system's
cache, and comes again from there when it is read again.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from tempfile import SpooledTemporaryFile
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lospmm.matrix.csr import check_nonzeros

Content: TypeAlias = bytes | mmap.mmap

#: So much is read at a time between two calls of ``give_back``.
PIECE_BYTES = 4 << 20

#: Files up to so many bytes are simply read.
SMALL_BYTES = 1 << 20


def content_of(file: IO[bytes]) -> Content:
    """The whole of an open file, which nobody may cut short meanwhile: reading beyond its end would be a bus error."""
    if isinstance(file, SpooledTemporaryFile) and file.name is None:  # in memory: to ask for its number makes it a file
        file.seek(0)
        return bytes(file.read())
    descriptor = file.fileno()
    file.flush()
    if os.fstat(descriptor).st_size > SMALL_BYTES:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    file.seek(0)
    return file.read()


def give_back(content: Content | memoryview) -> None:
    """Let go of the memory of a mapped file. Whatever refers to it stays as it is."""
    if isinstance(content, mmap.mmap):
        content.madvise(mmap.MADV_DONTNEED)


def pieces(content: Content, start: int, end: int) -> Iterator[bytes]:
    """The bytes from ``start`` to ``end``, PIECE_BYTES at a time, each given back once the next is asked for."""
    for at in range(start, end, PIECE_BYTES):
        yield content[at : min(at + PIECE_BYTES, end)]
        give_back(content)


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
