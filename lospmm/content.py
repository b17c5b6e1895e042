"""The bytes of a matrix file: in memory, or mapped from a file of this process's own, so that they need not be.

What is read of a mapped file counts as memory of this process until it is given back; it is then still in the system's
cache, and comes again from there when it is read again.
"""

import mmap
import os
from collections.abc import Iterator
from tempfile import SpooledTemporaryFile
from typing import IO, TypeAlias

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
