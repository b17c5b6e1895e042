"""cuSPARSE on the artifact's matrix: CSR, row-major B and C, fp32 sums, the faster of two algorithms.

Descriptors are made once for each copy of B and C, and ``cusparseSpMM_preprocess`` runs once for each algorithm, all
of it outside of the timing. CSR_ALG1 is not used: it is for column-major B, and on row-major B took ten times as long
as CSR_ALG2 on an H200. Constants and types: cusparse.h of CUDA 13.0.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from lospmm.gpu.libraries.library import (
    REAL,
    Buffers,
    Int,
    Int64,
    Library,
    LibraryFault,
    LibraryTask,
    Out,
    Pointer,
    Variants,
    create,
    open_nvidia,
    place_array,
    reserve,
)

#: cusparseSpMMAlg_t. ALG2 is NVIDIA's choice for row-major B; ALG3 profits from preprocessing (cuSPARSE, cusparseSpMM).
ALGORITHMS: Mapping[str, int] = {"CSR_ALG2": 6, "CSR_ALG3": 12}

NON_TRANSPOSE = 0  # CUSPARSE_OPERATION_NON_TRANSPOSE
ORDER_ROW = 2  # CUSPARSE_ORDER_ROW
INDEX_32I = 2  # CUSPARSE_INDEX_32I
BASE_ZERO = 0  # CUSPARSE_INDEX_BASE_ZERO
COMPUTE_32F = REAL["float32"]

# handle, opA, opB, alpha, matA, matB, beta, matC, computeType, alg
_SPMM = (Pointer, Int, Int, *(Pointer,) * 5, Int, Int)

TYPES: Mapping[str, tuple[type, ...]] = {
    "cusparseCreate": (Out,),
    "cusparseDestroy": (Pointer,),
    "cusparseGetVersion": (Pointer, Out),
    "cusparseSetStream": (Pointer, Pointer),
    # rows, cols, nnz, csrRowOffsets, csrColInd, csrValues, csrRowOffsetsType, csrColIndType, idxBase, valueType
    "cusparseCreateCsr": (Out, *(Int64,) * 3, *(Pointer,) * 3, *(Int,) * 4),
    "cusparseDestroySpMat": (Pointer,),
    "cusparseCreateDnMat": (Out, *(Int64,) * 3, Pointer, Int, Int),  # rows, cols, ld, values, valueType, order
    "cusparseDestroyDnMat": (Pointer,),
    "cusparseSpMM_bufferSize": (*_SPMM, Out),
    "cusparseSpMM_preprocess": (*_SPMM, Pointer),
    "cusparseSpMM": (*_SPMM, Pointer),
}


@contextmanager
def prepare(place: LibraryTask) -> Iterator[Variants]:
    """Yield one variant for each row of ``ALGORITHMS``. Raises LibraryFault, or GpuFault of the driver."""
    library = open_nvidia("cusparse", TYPES, "cusparseGetErrorName")
    with ExitStack() as stack:
        handle = create(stack, library, "cusparseCreate", "cusparseDestroy")
        library.call("cusparseSetStream", handle, place.driver.stream)
        copies_of_a = [_place_csr(stack, place) for _ in range(place.copies_of_a)]
        dense = tuple(_describe_dense(stack, library, place, copy) for copy in place.copies)
        describe = partial(create, stack, library, "cusparseCreateCsr", "cusparseDestroySpMat")
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)  # as long as they are pointed to

        def multiply(algorithm: int, a: Sequence[Pointer], name: str, copy: int, last: object) -> None:
            b, c = dense[copy]
            operands = (ctypes.byref(one), a[copy % len(a)], b, ctypes.byref(zero), c, COMPUTE_32F, algorithm)
            library.call(name, handle, NON_TRANSPOSE, NON_TRANSPOSE, *operands, last)

        variants: dict[str, Callable[[int], None]] = {}
        for name, algorithm in ALGORITHMS.items():
            # Preprocessing makes a descriptor of A the property of its buffer: one of each for every algorithm.
            a = tuple(describe(*csr) for csr in copies_of_a)
            try:
                variants[name] = _ready(stack, place, partial(multiply, algorithm, a), len(a))
            except LibraryFault as fault:
                variants[name] = partial(_refuse, fault)  # the other may still be timed
        version = library.version("cusparseGetVersion", handle)  # 12603 is 12.6.3
        yield Variants(library.title("cuSPARSE", version, 1000), variants)


def _ready(stack: ExitStack, place: LibraryTask, call: Callable[..., None], copies: int) -> Callable[[int], None]:
    """Give an algorithm its buffers and preprocess each copy of A for it."""
    size = ctypes.c_size_t()
    call("cusparseSpMM_bufferSize", 0, ctypes.byref(size))
    buffers = [reserve(stack, place.driver, size.value) for _ in range(copies)]
    for copy, buffer in enumerate(buffers):
        call("cusparseSpMM_preprocess", copy, buffer)
    return lambda copy: call("cusparseSpMM", copy, buffers[copy % len(buffers)])


def _refuse(fault: LibraryFault, _copy: int) -> None:
    raise fault


def _place_csr(stack: ExitStack, place: LibraryTask) -> tuple[int, ...]:
    """Copy A to the GPU, with 32-bit offsets and indices; return what describes it."""
    matrix, driver = place.matrix, place.driver
    arrays = matrix.indptr.astype(np.int32), matrix.indices, place.dtype.to_storage(matrix.data)
    addresses = (place_array(stack, driver, array) for array in arrays)
    kinds = (INDEX_32I, INDEX_32I, BASE_ZERO, REAL[place.dtype.storage])
    return matrix.m, matrix.k, matrix.nnz, *addresses, *kinds


def _describe_dense(stack: ExitStack, library: Library, place: LibraryTask, copy: Buffers) -> tuple[Pointer, Pointer]:
    n, real = place.n, REAL[place.dtype.storage]
    describe = partial(create, stack, library, "cusparseCreateDnMat", "cusparseDestroyDnMat")
    b = describe(place.matrix.k, n, n, copy.b, real, ORDER_ROW)
    return b, describe(place.matrix.m, n, n, copy.c, real, ORDER_ROW)
