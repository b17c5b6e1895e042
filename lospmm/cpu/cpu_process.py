"""The process that runs a kernel compiled by g++, so that a faulty kernel cannot harm lospmm.

Run by path, as ``python -I cpu_process.py LIBRARY ENTRY B_ADDRESS C_ADDRESS RESIDUAL_ADDRESS SIZE...`` (the sizes are
shim.h's ``Geometry``), in a directory with the files ``columns`` (int64), ``b``, ``c`` and perhaps ``residual``
(float32, row-major), of which c is written; a dot on stdout is a hundredth of it. It imports nothing of lospmm, so
that it starts quickly.
"""

import ctypes
import mmap
import sys
from pathlib import Path


def run(library_path: str, entry: str, addresses: list[int], sizes: list[int]) -> None:
    """Run the kernel on the files in this directory and overwrite ``c``."""
    library = ctypes.CDLL(library_path)
    columns, b, c = (_mapped(name) for name in ("columns", "b", "c"))
    residual = _mapped("residual") if Path("residual").exists() else None
    count = len(columns) // ctypes.sizeof(ctypes.c_int64)
    library.lospmm_run.restype = None
    library.lospmm_run(
        library[entry],
        _array(sizes),
        _array(addresses),
        _pointer(columns),
        ctypes.c_uint64(count),
        *map(_pointer, (b, c)),
        None if residual is None else _pointer(residual),
    )


def _mapped(name: str) -> mmap.mmap:
    with Path(name).open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _pointer(mapped: mmap.mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapped)))


def _array(values: list[int]) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * len(values))(*values)


def main(library_path: str, entry: str, *numbers: str) -> None:
    """Run with the arguments of the command line."""
    b_address, c_address, residual_address, *sizes = (int(number) for number in numbers)
    run(library_path, entry, [b_address, c_address, residual_address], sizes)


if __name__ == "__main__":
    main(*sys.argv[1:])
