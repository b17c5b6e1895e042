"""The bytes of a matrix file: held in memory, or memory-mapped if the file is this process's own.

Pages that were read of a mapped file count as memory of this process until ``give_back`` releases them; they stay in
the page cache, from which a second read takes them.
"""

import io
import mmap
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from lospmm.matrix.csr import check_nonzeros


class MappedFile(mmap.mmap):
    """A mapped file, which ``zipfile`` can read."""

    def seekable(self) -> bool:
        """Return True."""
        return True


Content: TypeAlias = bytes | MappedFile

#: Bytes that are read between two calls of ``give_back``.
PIECE_BYTES = 4 << 20

#: Files up to this size are read, larger ones mapped.
SMALL_BYTES = 1 << 20


def content_of(file: IO[bytes]) -> Content:
    """Return all bytes of an open file, mapped if it is large.

    Nobody may truncate a mapped file meanwhile: a read beyond its end would be a bus error.
    """
    if isinstance(file, SpooledTemporaryFile) and file.name is None:  # in memory: fileno() would write it to disk
        file.seek(0)
        return bytes(file.read())
    descriptor = file.fileno()
    file.flush()
    if os.fstat(descriptor).st_size > SMALL_BYTES:
        return MappedFile(descriptor, 0, access=mmap.ACCESS_READ)
    file.seek(0)
    return file.read()


class LocalFile(MappedFile):
    """A mapped file of this machine, and its folder, where it may name other files."""

    folder: Path


def local_file(file: IO[bytes]) -> LocalFile:
    """Return all bytes of an open file that is not empty, mapped."""
    mapped = LocalFile(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.folder = Path(file.name).parent
    return mapped


def give_back(content: Content | memoryview) -> None:
    """Release the pages of a mapped file. References to it stay valid."""
    if isinstance(content, mmap.mmap):
        content.madvise(mmap.MADV_DONTNEED)


def pieces(content: Content, part: Content | memoryview) -> Iterator[bytes | memoryview]:
    """Yield a ``part`` of the content by PIECE_BYTES, releasing each piece before the next."""
    for at in range(0, len(part), PIECE_BYTES):
        yield part[at : at + PIECE_BYTES]
        give_back(content)


def opened_content(content: Content) -> IO[bytes]:
    """Return the content as a file."""
    return cast(IO[bytes], content) if isinstance(content, MappedFile) else io.BytesIO(content)


def member_bytes(content: Content, member: zipfile.ZipInfo) -> memoryview:
    """Return the bytes of an uncompressed member of a zip archive in place. Raises BadZipFile or struct.error."""
    name_bytes, extra_bytes = struct.unpack_from("<HH", content, member.header_offset + 26)
    start = member.header_offset + 30 + name_bytes + extra_bytes
    if start + member.file_size > len(content):
        raise zipfile.BadZipFile(f"member {member.filename[:80]!r} ends behind the file")
    return memoryview(content)[start : start + member.file_size]


Array = NDArray[Any]

#: Converts a piece of an array to numbers.
Decode = Callable[[Array], Array]


def as_it_is(piece: Array) -> Array:
    """Return the piece unchanged: the decoder of types that NumPy has."""
    return piece


def nonzeros(array: Array, content: Content, decode: Decode = as_it_is) -> tuple[tuple[NDArray[np.int64], ...], Array]:
    """Return the indices of the nonzeros of ``array`` along each axis, and their values; each (nonzeros,).

    ``array`` is contiguous by rows or by columns, and not empty; it may lie in ``content``, whose pages are released.
    Raises BadMatrix for more than LOSPMM_MAX_NONZEROS, before it allocates anything for them.
    """
    order: Any = "C" if array.flags.c_contiguous else "F"
    flat = array.reshape(-1, order=order)
    count = sum(int(np.count_nonzero(piece)) for _, piece in _pieces(flat, content, decode))
    check_nonzeros(count, array.size)
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
