"""The vendor's dense multiplication as a kernel, chosen if no sparse one is faster.

It is called as a ``gpu.launcher.Launcher`` is, with a stream and the addresses of B and C, in the context of a driver
that holds the dense A. Nothing of it is compiled: an artifact of this choice (``dense_choice``) has A, and a sparse
kernel as a fallback. ``lospmm.nn`` leaves such a layer to torch, whose linear layer calls the same library.
"""

import threading
from contextlib import ExitStack

from lospmm.errors import GpuFault
from lospmm.gpu.libraries.cublas import (
    COMPUTE_32F,
    COMPUTE_32F_FAST_TF32,
    MAX_DENSE_BYTES,
    create_handle,
    multiply,
    open_library,
    place_dense,
    use_stream,
)
from lospmm.gpu.libraries.library import REAL, LibraryFault, LibraryTask
from lospmm.gpu.protocol import Driver
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.dtype import Dtype
from lospmm.problem.problem import Problem


def refusal(problem: Problem) -> str | None:
    """Return why there is no dense kernel for a problem, in a few words, or None."""
    matrix = problem.matrix
    if problem.convolution is not None:
        return "a convolution"
    if not problem.epilogue.is_plain:
        return "an epilogue"
    if matrix.m * matrix.k * problem.dtype.element_bytes > MAX_DENSE_BYTES:
        return f"dense A takes more than {MAX_DENSE_BYTES >> 30} GiB"
    return None


class CublasKernel:
    """C (m, n) = A x B by cuBLAS in a type. Raises GpuFault without cuBLAS or memory."""

    def __init__(self, matrix: SparseMatrix, n: int, dtype: Dtype, driver: Driver) -> None:
        self._shape = matrix.m, matrix.k, n
        self._real = REAL[dtype.storage]
        self._compute = COMPUTE_32F_FAST_TF32 if dtype.name == "tf32" else COMPUTE_32F
        self._lock = threading.Lock()  # a handle has one stream at a time
        self._stream: int | None = None
        with ExitStack() as stack:
            try:
                self._library = open_library()
                self._handle, self._workspace = create_handle(stack, self._library, driver)
                (self._a,) = place_dense(stack, LibraryTask(driver, matrix, n, (), dtype=dtype))
            except LibraryFault as fault:
                raise GpuFault(str(fault)) from None
            self._held = stack.pop_all()

    def __call__(self, stream: int, b: int, c: int, residual: int = 0) -> bool:
        """Put the multiplication on a stream (a CUstream as a number); return True. Raises GpuFault."""
        assert not residual, "a dense kernel has no epilogue"
        try:
            with self._lock:
                if stream != self._stream:
                    use_stream(self._library, self._handle, stream, self._workspace)
                    self._stream = stream
                multiply(self._library, self._handle, self._shape, self._real, self._compute, b, self._a, c)
        except LibraryFault as fault:
            raise GpuFault(f"dense: {fault}") from None
        return True

    def unload(self) -> None:
        """Free A and the library's handle, once nothing multiplies any more."""
        self._held.close()
