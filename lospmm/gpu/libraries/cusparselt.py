"""cuSPARSELt on an A of 2:4 sparsity: of four neighbours in a row, two are zero.

An alternative for users: A pruned to 2:4 by magnitude, if it is not 2:4 already, for twice the arithmetic of a dense
layer. That is another matrix, so its time is shown beside the kernel's but decides nothing, and the gate compares C
with the product of the pruned A. Compressing A and searching the library's algorithms are not timed.

Functions, structures and enumerators: cusparseLt.h of 0.8.0, which PyTorch 2.11 brings, and of 0.10.0, which agree, and
https://docs.nvidia.com/cuda/cusparselt/functions.html. A GPU before sm_80 is refused by the library itself.
"""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from lospmm.gpu.libraries.cublas import place_dense
from lospmm.gpu.libraries.cusparse import NON_TRANSPOSE, ORDER_ROW
from lospmm.gpu.libraries.library import (
    REAL,
    Int,
    Int64,
    Library,
    LibraryFault,
    LibraryTask,
    Out,
    Pointer,
    Variants,
    open_nvidia,
    reserve,
)
from lospmm.matrix.csr import SparseMatrix

#: The names of the only variant: whether it computes the kernel's product.
EXACT, PRUNED = "A is 2:4", "A pruned to 2:4"

#: In 16-bit types rows and columns of A are multiples of the first, those of B and C of the second.
MULTIPLE_OF_A, MULTIPLE_OF_B = 16, 8

ALIGNMENT_BYTES = 16  # of addresses; those of the driver are multiples of more
SPARSITY_50_PERCENT = 0  # CUSPARSELT_SPARSITY_50_PERCENT
COMPUTE_32F = 2  # CUSPARSE_COMPUTE_32F
ALG_DEFAULT = 0  # CUSPARSELT_MATMUL_ALG_DEFAULT

#: Any of the library's structures, which the caller allocates: 512 bytes, aligned to 16, but 11,024 in old versions.
Opaque = ctypes.c_uint64 * 2048

# handle, matDescr, rows, cols, ld, alignment, valueType, order
_DENSE = (Pointer, Out, *(Int64,) * 3, ctypes.c_uint32, Int, Int)

# handle, plan, alpha, A, B, beta, C, D, workspace, streams, how many
_MATMUL = (*(Pointer,) * 10, ctypes.c_int32)

TYPES: Mapping[str, tuple[type, ...]] = {
    "cusparseLtInit": (Out,),
    "cusparseLtDestroy": (Pointer,),
    "cusparseLtGetVersion": (Pointer, Out),
    "cusparseLtDenseDescriptorInit": _DENSE,
    "cusparseLtStructuredDescriptorInit": (*_DENSE, Int),  # sparsity
    "cusparseLtMatDescriptorDestroy": (Pointer,),
    # handle, product, opA, opB, A, B, C, D, compute type
    "cusparseLtMatmulDescriptorInit": (Pointer, Out, Int, Int, *(Pointer,) * 4, Int),
    "cusparseLtMatmulAlgSelectionInit": (Pointer, Out, Pointer, Int),
    "cusparseLtMatmulAlgSelectionDestroy": (Pointer,),
    "cusparseLtMatmulPlanInit": (Pointer, Out, Pointer, Pointer),
    "cusparseLtMatmulPlanDestroy": (Pointer,),
    "cusparseLtMatmulGetWorkspace": (Pointer, Pointer, Out),
    "cusparseLtMatmulSearch": _MATMUL,
    "cusparseLtMatmul": _MATMUL,
    "cusparseLtSpMMACompressedSize": (Pointer, Pointer, Out, Out),  # of the compressed A, of a buffer to compress with
    "cusparseLtSpMMACompress": (*(Pointer,) * 6,),  # handle, plan, dense, compressed, buffer, stream
}


@contextmanager
def prepare(place: LibraryTask) -> Iterator[Variants]:
    """Yield EXACT or PRUNED, with the matrix that it multiplies. Raises LibraryFault, or GpuFault of the driver."""
    m, k, n, real = place.matrix.m, place.matrix.k, place.n, REAL[place.dtype.storage]
    if m % MULTIPLE_OF_A or k % MULTIPLE_OF_A or n % MULTIPLE_OF_B:
        raise LibraryFault(f"takes m and k in multiples of {MULTIPLE_OF_A} and n in multiples of {MULTIPLE_OF_B}")
    library, pruned = open_nvidia("cusparseLt", TYPES, "cusparseLtGetErrorName"), prune(place.matrix)
    with ExitStack() as stack:
        handle = Opaque()
        library.call("cusparseLtInit", handle)
        stack.callback(library.functions.cusparseLtDestroy, handle)

        def make(name: str, destroyer: str, *arguments: object) -> "ctypes.Array[ctypes.c_uint64]":
            made = Opaque()
            library.call(f"cusparseLt{name}Init", handle, made, *arguments)
            stack.callback(getattr(library.functions, f"cusparseLt{destroyer}Destroy"), made)
            return made

        def layout(rows: int, columns: int) -> tuple[int, ...]:
            return rows, columns, columns, ALIGNMENT_BYTES, real, ORDER_ROW

        a = make("StructuredDescriptor", "MatDescriptor", *layout(m, k), SPARSITY_50_PERCENT)
        b, c = (make("DenseDescriptor", "MatDescriptor", *layout(rows, n)) for rows in (k, m))
        product = Opaque()  # nothing destroys it
        operations = (NON_TRANSPOSE, NON_TRANSPOSE, a, b, c, c, COMPUTE_32F)
        library.call("cusparseLtMatmulDescriptorInit", handle, product, *operations)
        algorithm = make("MatmulAlgSelection", "MatmulAlgSelection", product, ALG_DEFAULT)
        plan = make("MatmulPlan", "MatmulPlan", product, algorithm)
        weights = _compress(stack, replace(place, matrix=pruned), library, handle, plan)
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        streams = (Pointer * 1)(place.driver.stream)

        def multiply(name: str, workspace: int | None, copy: int) -> None:
            own_b, own_c = place.copies[copy]
            operands = (ctypes.byref(one), weights[copy % len(weights)], own_b, ctypes.byref(zero), own_c, own_c)
            library.call(name, handle, plan, *operands, workspace, streams, len(streams))

        # No workspace, as in NVIDIA's sample: the search cannot be told its size.
        multiply("cusparseLtMatmulSearch", None, 0)
        size = ctypes.c_size_t()
        library.call("cusparseLtMatmulGetWorkspace", handle, plan, ctypes.byref(size))
        enqueue = partial(multiply, "cusparseLtMatmul", reserve(stack, place.driver, size.value))
        version = library.version("cusparseLtGetVersion", handle)  # 800 is 0.8.0, 1000 is 0.10.0
        title = library.title("cuSPARSELt", version, 1_000_000)
        is_exact = pruned.nnz == place.matrix.nnz
        yield Variants(title, {EXACT if is_exact else PRUNED: enqueue}, None if is_exact else pruned)


def _compress(
    stack: ExitStack,
    place: LibraryTask,
    library: Library,
    handle: "ctypes.Array[ctypes.c_uint64]",
    plan: "ctypes.Array[ctypes.c_uint64]",
) -> list[int]:
    """Return the device address of each copy of A, which is 2:4, as the library reads it."""
    driver, size, buffer_size = place.driver, ctypes.c_size_t(), ctypes.c_size_t()
    library.call("cusparseLtSpMMACompressedSize", handle, plan, ctypes.byref(size), ctypes.byref(buffer_size))
    addresses = [reserve(stack, driver, size.value) for _ in range(place.copies_of_a)]
    with ExitStack() as brief:
        (dense,) = place_dense(brief, replace(place, copies_of_a=1))
        buffer = reserve(brief, driver, buffer_size.value)
        for address in addresses:
            library.call("cusparseLtSpMMACompress", handle, plan, dense, address, buffer, driver.stream)
        driver.synchronize()
    return addresses


def prune(matrix: SparseMatrix) -> SparseMatrix:
    """Return A with the two largest weights of each four neighbours in a row, of equal ones the first.

    k is a multiple of 4.
    """
    fours = matrix.rows_of_nonzeros().astype(np.int64) * (matrix.k // 4) + matrix.indices // 4
    sizes, larger = np.abs(matrix.data), np.zeros(matrix.nnz, dtype=np.int8)  # how many of its four are larger
    for apart in range(1, 4):
        is_same = fours[:-apart] == fours[apart:]
        is_first = sizes[:-apart] >= sizes[apart:]
        larger[apart:] += is_same & is_first
        larger[:-apart] += is_same & ~is_first
    kept = larger < 2
    before = np.concatenate(([0], np.cumsum(kept)))
    return SparseMatrix(matrix.m, matrix.k, before[matrix.indptr], matrix.indices[kept], matrix.data[kept])
