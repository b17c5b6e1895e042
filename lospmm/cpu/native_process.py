"""The process that runs a kernel compiled by g++, so that a faulty kernel cannot harm lospmm.

Run by path, as ``python -I native_process.py RUNNER LIBRARY ENTRY NUMBER...``: the library that has ``lospmm_run``
(shim.h or block.cpp, which say what the numbers are) and the kernel's, perhaps the same. It does so in a directory with
the files ``columns`` (int64), ``b``, ``c`` and perhaps ``data`` and ``residual``, of which c is written; a dot on
stdout is a hundredth of it. It imports nothing of lospmm, so that it starts quickly.
"""

import ctypes
import mmap
import sys
from pathlib import Path

PAGE = mmap.PAGESIZE

#: Address space behind each operand that cannot be accessed; nothing is allocated for it.
GUARD_BYTES = 64 << 20

_OPERANDS = ("data", "b", "c", "residual")


def run(runner_path: str, library_path: str, entry: str, numbers: list[int]) -> None:
    """Run the kernel on the files in this directory and overwrite ``c``."""
    runner = ctypes.CDLL(runner_path, mode=ctypes.RTLD_GLOBAL)  # whose functions the kernel's library calls
    library = ctypes.CDLL(library_path)
    columns = Path("columns").read_bytes()
    held = {name: Guarded(Path(name).read_bytes()) for name in _OPERANDS if Path(name).exists()}
    runner.lospmm_run.restype = None
    runner.lospmm_run(
        library[entry],
        (ctypes.c_uint64 * len(numbers))(*numbers),
        columns,
        ctypes.c_uint64(len(columns) // 8),
        *(ctypes.c_void_p(held[name].address if name in held else None) for name in _OPERANDS),
    )
    Path("c").write_bytes(held["c"].content())


class Guarded:
    """Bytes that end, within 256 bytes, at the end of a page, before pages that cannot be accessed."""

    def __init__(self, content: bytes) -> None:
        self.size = len(content)
        room = -(-max(self.size, 1) // 256) * 256
        pages = -(-room // PAGE) * PAGE
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


def main(runner_path: str, library_path: str, entry: str, *numbers: str) -> None:
    """Run with the arguments of the command line."""
    run(runner_path, library_path, entry, [int(number) for number in numbers])


if __name__ == "__main__":
    main(*sys.argv[1:])
