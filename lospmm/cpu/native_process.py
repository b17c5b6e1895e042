"""The process that runs a kernel compiled by g++, so that a faulty kernel cannot harm lospmm.

Run by path, as ``python -I native_process.py RUNNER LIBRARY ENTRY NUMBER...``: the library that has ``lospmm_run``
(shim.h or block.cpp, which say what the numbers are) and the kernel's, perhaps the same. It does so in a directory with
the files ``columns`` (int64), ``b``, ``c`` and perhaps ``data`` and ``residual``, of which c is written; a dot on
stdout is a hundredth of it. It imports nothing of lospmm, nor pathlib, so that it starts quickly.
"""

import ctypes
import mmap
import os
import sys

#: Address space behind each operand that cannot be accessed; nothing is allocated for it.
GUARD_BYTES = 64 << 20

_OPERANDS = ("data", "b", "c", "residual")


def run(runner_path: str, library_path: str, entry: str, *numbers: str) -> None:
    """Run the kernel on the files in this directory, with the rest of the command line, and overwrite ``c``."""
    runner = ctypes.CDLL(runner_path, mode=ctypes.RTLD_GLOBAL)  # whose functions the kernel's library calls
    library = ctypes.CDLL(library_path)
    columns = _content("columns")
    held = {name: Guarded(_content(name)) for name in _OPERANDS if os.path.exists(name)}
    runner.lospmm_run(
        library[entry],
        (ctypes.c_uint64 * len(numbers))(*map(int, numbers)),
        columns,
        ctypes.c_uint64(len(columns) // 8),
        *(ctypes.c_void_p(held[name].address if name in held else None) for name in _OPERANDS),
    )
    with open("c", "wb") as file:
        file.write(held["c"].content())


def _content(name: str) -> bytes:
    with open(name, "rb") as file:
        return file.read()


class Guarded:
    """Bytes that end, within 256 bytes, at the end of a page, before pages that cannot be accessed."""

    def __init__(self, content: bytes) -> None:
        self.size = len(content)
        room = -(-max(self.size, 1) // 256) * 256
        pages = -(-room // mmap.PAGESIZE) * mmap.PAGESIZE
        self._mapped = mmap.mmap(-1, pages + GUARD_BYTES)
        self._start = pages - room
        self._mapped[self._start : self._start + self.size] = content
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
        self.address = start + self._start
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(start + pages), ctypes.c_size_t(GUARD_BYTES), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")

    def content(self) -> bytes:
        """Return the bytes."""
        return self._mapped[self._start : self._start + self.size]


if __name__ == "__main__":
    run(*sys.argv[1:])
