"""cuBLAS with a dense A, the cost of a dense layer: in full fp32, in TF32 and on 16-bit elements.

cuBLAS is column-major. It reads a row-major matrix as its transpose, and C^T = B^T x A^T: B goes first, with n as the
leading dimension of it and of C, and k as that of A. Constants and types: cublas_api.h of CUDA 13.0.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.gpu.libraries import cublaslt
from lospmm.gpu.libraries.cublaslt import DenseLayout
from lospmm.gpu.libraries.library import (
    REAL,
    WORKSPACE_BYTES,
    Enqueue,
    Int,
    Library,
    LibraryFault,
    LibraryTask,
    Out,
    Pointer,
    Variants,
    create,
    open_nvidia,
    reserve,
)
from lospmm.gpu.protocol import Driver
from lospmm.problem.dtype import FLOAT_BYTES

OP_N = 0  # CUBLAS_OP_N
GEMM_DEFAULT = -1  # CUBLAS_GEMM_DEFAULT: cuBLAS's own heuristics
DEFAULT_MATH = 0  # CUBLAS_DEFAULT_MATH: nothing is rounded that the compute type does not round

#: cublasComputeType_t. 32F is full fp32 while the math mode is the default; the gate would notice if it were not. It
#: multiplies 16-bit elements exactly and sums in fp32, except for partial sums, which may be 16-bit.
COMPUTE_32F = 68
COMPUTE_32F_FAST_TF32 = 77

_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)

#: With a larger dense A there is no comparison: nobody would run that layer dense.
MAX_DENSE_BYTES = 16 << 30

#: A is written out and sent in pieces of this size in float32, so that the host never holds all of it.
PIECE_BYTES = 64 << 20

TYPES: Mapping[str, tuple[type, ...]] = {
    "cublasCreate_v2": (Out,),
    "cublasDestroy_v2": (Pointer,),
    "cublasGetVersion_v2": (Pointer, Out),
    "cublasSetStream_v2": (Pointer, Pointer),
    "cublasSetWorkspace_v2": (Pointer, Pointer, ctypes.c_size_t),
    "cublasSetMathMode": (Pointer, Int),
    # handle, transa, transb, m, n, k, alpha, A, Atype, lda, B, Btype, ldb, beta, C, Ctype, ldc, computeType, algo
    "cublasGemmEx": (Pointer, *(Int,) * 5, Pointer, *(Pointer, Int, Int) * 2, Pointer, Pointer, *(Int,) * 4),
}


def open_library() -> Library:
    """Open cuBLAS. Raises LibraryFault where there is none."""
    return open_nvidia("cublas", TYPES, "cublasGetStatusName")


@contextmanager
def prepare(place: LibraryTask, *, name: str, compute: int = COMPUTE_32F) -> Iterator[Variants]:
    """Yield the variant ``name`` of the compute type ``compute``, and in a search cuBLASLt's proposals.

    Raises LibraryFault, or GpuFault.
    """
    driver, library = place.driver, open_library()
    with ExitStack() as stack:
        handle, workspace = create_handle(stack, library, driver)
        use_stream(library, handle, driver.stream, workspace)
        a, shape, real = place_dense(stack, place), (place.matrix.m, place.matrix.k, place.n), REAL[place.dtype.storage]

        def addresses(copy: int) -> tuple[int, int, int]:
            return place.copies[copy].b, a[copy % len(a)], place.copies[copy].c

        def enqueue(copy: int) -> None:
            multiply(library, handle, shape, real, compute, *addresses(copy))

        ways: dict[str, Enqueue] = {name: enqueue}
        if place.is_searched:
            m, k, n = shape
            layouts = DenseLayout(real, n, k), DenseLayout(real, k, m), DenseLayout(real, n, m)
            asked = cublaslt.DenseProduct(compute, layouts, addresses)
            found = cublaslt.proposals(stack, driver, cublaslt.open_library(), asked, workspace)
            ways |= {f"{name}, cuBLASLt {number}": way for number, way in enumerate(found, start=1)}
        version = library.version("cublasGetVersion_v2", handle)  # 130002 is 13.0.2
        yield Variants(library.title("cuBLAS", version, 10_000), ways)


def create_handle(stack: ExitStack, library: Library, driver: Driver) -> tuple[Pointer, int]:
    """Return a handle, and the address of a workspace for ``use_stream``; both are freed with ``stack``."""
    handle = create(stack, library, "cublasCreate_v2", "cublasDestroy_v2")
    library.call("cublasSetMathMode", handle, DEFAULT_MATH)
    return handle, reserve(stack, driver, WORKSPACE_BYTES)


def use_stream(library: Library, handle: Pointer, stream: int, workspace: int) -> None:
    """Have a handle work on a stream. In this order: a new stream takes the workspace away again."""
    library.call("cublasSetStream_v2", handle, stream)
    library.call("cublasSetWorkspace_v2", handle, workspace, WORKSPACE_BYTES)


def multiply(
    library: Library, handle: Pointer, shape: tuple[int, int, int], real: int, compute: int, b: int, a: int, c: int
) -> None:
    """Put C = A x B on the handle's stream. ``shape`` is (m, k, n), ``real`` a cudaDataType; the last are addresses."""
    m, k, n = shape
    operands = (ctypes.byref(_ONE), b, real, n, a, real, k, ctypes.byref(_ZERO), c, real, n)
    library.call("cublasGemmEx", handle, OP_N, OP_N, n, m, k, *operands, compute, GEMM_DEFAULT)


def place_dense(
    stack: ExitStack, place: LibraryTask, store: Callable[[NDArray[np.float32]], NDArray[Any]] | None = None
) -> list[int]:
    """Return the device address of each copy of A (m, k), row-major, its zeros written out.

    ``store`` turns whole rows of A into what lies in memory, by default elements of ``place.dtype``. Raises
    LibraryFault where a copy takes more than MAX_DENSE_BYTES.
    """
    matrix, store = place.matrix, place.dtype.to_storage if store is None else store
    row_bytes = store(np.zeros((1, matrix.k), dtype=np.float32)).nbytes
    if row_bytes * matrix.m > MAX_DENSE_BYTES:
        raise LibraryFault(f"dense A takes {row_bytes * matrix.m} bytes, over {MAX_DENSE_BYTES}")
    addresses = [reserve(stack, place.driver, row_bytes * matrix.m) for _ in range(place.copies_of_a)]
    step = max(1, PIECE_BYTES // (FLOAT_BYTES * matrix.k))
    for start in range(0, matrix.m, step):
        piece = store(matrix.dense_rows(start, min(start + step, matrix.m)))
        for address in addresses:
            place.driver.upload(address + row_bytes * start, piece)
    return addresses
