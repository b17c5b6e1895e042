"""Third-party shared libraries, called through ctypes: found, typed, and their statuses as messages.

A baseline (``libraries/__init__.py``) gets a ``LibraryTask`` to compute in and yields ``Variants`` to time. What it
allocates and creates is released in the reverse order, whatever fails.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lospmm.gpu.protocol import Driver
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.dtype import FLOAT32, Dtype

#: The status of success of every library here.
SUCCESS = 0

#: An allocation is never empty: a matrix without a nonzero has addresses too.
LEAST_BYTES = 4

#: cudaDataType (library_types.h of CUDA 13.0) of the types in memory: CUDA_R_32F, CUDA_R_16F and CUDA_R_16BF.
REAL: Mapping[str, int] = MappingProxyType({"float32": 0, "float16": 2, "bfloat16": 14})

#: What NVIDIA recommends on Hopper (cuBLAS, cublasSetWorkspace). With a workspace of ours a graph can capture the call.
WORKSPACE_BYTES = 32 << 20

Int, Int64 = ctypes.c_int, ctypes.c_int64
Pointer = ctypes.c_void_p  # of the host or of the device, a handle or a stream
Out = ctypes.c_void_p  # where a function puts what it returns beside its status


class LibraryFault(Exception):
    """A library that is missing or refused a call; its one-line message is shown to users."""


class Buffers(NamedTuple):
    """The device addresses of one copy of B (k, n) and C (m, n), both row-major and of the same type."""

    b: int
    c: int


@dataclass(frozen=True, slots=True)
class LibraryTask:
    """Where a baseline computes C = A x B: on ``driver.stream``, for each of ``copies`` in turn."""

    driver: Driver
    matrix: SparseMatrix
    n: int
    copies: Sequence[Buffers]
    sputnik: Path | None = None  # the shared library that a user has named
    dtype: Dtype = FLOAT32  # of A, B and C
    copies_of_a: int = 1  # copy i of B is multiplied by number i modulo this
    is_searched: bool = False  # whether more of a library's algorithms are timed than the one that it takes by itself


#: Puts the work for one copy of B and C on the stream.
Enqueue = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Variants:
    """The ways in which a library computes C, by name; each enqueues the work for one copy."""

    library: str  # its name, its version and its file
    enqueue: Mapping[str, Enqueue]
    multiplied: SparseMatrix | None = None  # in place of A, where it is another matrix
    error_of: Callable[[Enqueue], float] | None = None  # in place of the gate, where B and C are the library's own


#: How to install what is not ``nvidia-NAME`` on PyPI.
INSTALL: Mapping[str, str] = MappingProxyType(
    {
        "cublasLt": "pip install nvidia-cublas, or a CUDA toolkit",
        "cusparseLt": "pip install nvidia-cusparselt-cu13",  # no part of the toolkit
    }
)


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded library: a ctypes.CDLL whose functions have types, one of which has the words of a status."""

    path: str
    functions: Any
    status_name: str | None  # const char *NAME(status)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns a status. Raises LibraryFault for any but success."""
        status = getattr(self.functions, name)(*arguments)
        if status != SUCCESS:
            words: bytes | None = None
            if self.status_name is not None:
                function = getattr(self.functions, self.status_name)
                function.argtypes, function.restype = [ctypes.c_int], ctypes.c_char_p
                words = function(status)
            raise LibraryFault(f"{name}: {f'status {status}' if words is None else words.decode(errors='replace')}")

    def version(self, function: str, handle: object) -> int:
        """Return the number that a function puts behind its last argument."""
        number = ctypes.c_int()
        self.call(function, handle, ctypes.byref(number))
        return number.value

    def title(self, name: str, version: int, major: int) -> str:
        """Return name, version and file; the version's first part counts ``major``, its second 100."""
        number = f"{version // major}.{version % major // 100}.{version % 100}"
        return f"{name} {number} ({Path(self.path).name})"


def find(name: str) -> str:
    """Find the file of one of NVIDIA's libraries, as "cusparse": of PyPI, the system or CUDA_HOME.

    Raises LibraryFault with what to install.
    """
    from cuda import pathfinder  # it takes a while to import

    try:
        path = pathfinder.load_nvidia_dynamic_lib(name).abs_path
    except RuntimeError:  # pathfinder's message lists every folder that it looked into
        path = None
    if path is None:
        how = INSTALL.get(name, f"pip install nvidia-{name}, or a CUDA toolkit")
        raise LibraryFault(f"lib{name} is not installed; {how}")
    return str(path)


def load(path: str, types: Mapping[str, Sequence[type]], status_name: str | None = None) -> Library:
    """Load a library, its functions with their argument types; each returns a status, an int.

    The function ``status_name`` has the words of a status. Raises LibraryFault where the file or one of the functions
    is missing.
    """
    try:
        functions = ctypes.CDLL(path)
    except OSError as error:
        raise LibraryFault(f"{path}: cannot be loaded: {error}") from None
    for name, argument_types in types.items():
        try:
            function = getattr(functions, name)
        except AttributeError:
            raise LibraryFault(f"{path}: has no function {name}") from None
        function.argtypes, function.restype = list(argument_types), ctypes.c_int
    return Library(path, functions, status_name)


def open_nvidia(name: str, types: Mapping[str, Sequence[type]], status_name: str) -> Library:
    """Open one of NVIDIA's libraries, whose function ``status_name`` has the words of a status.

    Raises LibraryFault where there is none.
    """
    return load(find(name), types, status_name)


def create(stack: ExitStack, library: Library, maker: str, destroyer: str, *arguments: Any) -> Pointer:
    """Return what ``maker`` puts behind its first argument; ``destroyer`` frees it with ``stack``."""
    made = Pointer()
    library.call(maker, ctypes.byref(made), *arguments)
    stack.callback(getattr(library.functions, destroyer), made)
    return made


def reserve(stack: ExitStack, driver: Driver, size: int) -> int:
    """Return device memory of at least ``size`` bytes, freed when ``stack`` is left."""
    address = driver.allocate(max(size, LEAST_BYTES))
    stack.callback(driver.free, address)
    return address


def place_array(stack: ExitStack, driver: Driver, array: NDArray[Any]) -> int:
    """Copy ``array`` to the GPU and return its address, freed when ``stack`` is left."""
    address = reserve(stack, driver, array.nbytes)
    if array.nbytes:
        driver.upload(address, np.ascontiguousarray(array))
    return address
