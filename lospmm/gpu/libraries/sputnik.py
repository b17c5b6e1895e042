"""Sputnik (Gale et al., SC 2020), if a user names a shared library with its C entry point.

Sputnik is C++ without a C interface, so the user builds this one function around it:

    extern "C" int sputnik_cuda_spmm(int m, int k, int n, int nonzeros, const int *row_indices, const float *values,
                                     const int *row_offsets, const int *column_indices, const float *dense_matrix,
                                     float *output_matrix, void *stream);

Its arguments are those of ``sputnik::CudaSpmm`` (sputnik/spmm/cuda_spmm.h); it returns the cudaError_t.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lospmm.gpu.libraries.library import (
    Int,
    Library,
    LibraryFault,
    LibraryTask,
    Pointer,
    Variants,
    load,
    place_array,
)
from lospmm.matrix.csr import SparseMatrix

ENTRY = "sputnik_cuda_spmm"

# m, k, n, nonzeros, row_indices, values, row_offsets, column_indices, dense_matrix, output_matrix, stream
TYPES: Mapping[str, tuple[type, ...]] = {ENTRY: (*(Int,) * 4, *(Pointer,) * 7)}


def open_library(path: Path | None) -> Library:
    """Open Sputnik. Raises LibraryFault where no file is named, or where it is not Sputnik."""
    if path is None:
        raise LibraryFault("no library is named; build one and name it with --sputnik (docs/benchmarking.md)")
    # Resolved: a bare name would be looked for in the system's folders.
    return load(str(path.resolve()), TYPES)


@contextmanager
def prepare(place: LibraryTask) -> Iterator[Variants]:
    """Yield one variant. Raises LibraryFault, or GpuFault of the driver."""
    library = open_library(place.sputnik)
    with ExitStack() as stack:
        upload = partial(place_array, stack, place.driver)
        matrix = place.matrix
        parts = (row_order(matrix), matrix.data, matrix.indptr.astype(np.int32), matrix.indices)
        a = [tuple(map(upload, parts)) for _ in range(place.copies_of_a)]

        def enqueue(copy: int) -> None:
            sizes, (b, c) = (matrix.m, matrix.k, place.n, matrix.nnz), place.copies[copy]
            library.call(ENTRY, *sizes, *a[copy % len(a)], b, c, place.driver.stream)

        yield Variants(f"Sputnik ({Path(library.path).name})", {"CudaSpmm": enqueue})


def row_order(matrix: SparseMatrix) -> NDArray[np.int32]:
    """Return the rows, the longest first, (m,): Sputnik's row swizzle, which balances warps."""
    return np.argsort(-matrix.row_nnz, kind="stable").astype(np.int32)
