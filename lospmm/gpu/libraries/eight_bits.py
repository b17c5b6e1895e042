"""cuBLASLt with a dense A and B of 8 bits: int8 with int32 sums, or E4M3 with float32 sums and a C of 16 bits.

An alternative for users of ``--values``: the codes of A, zeros included. It is another product, as B has 8 bits too, so
its time is shown beside the kernel's but decides nothing. The comparison favours the library, since neither rounding B
nor scaling C is timed. The gate knows neither its B nor its C: some rows of C are compared with float64 of the codes.
In the cache state "network" its B comes from memory.

FP8 needs A transposed and B not ("TN", cuBLAS documentation, cublasLtMatmul): weights (m, k) and activations (n, k)
give (n, m), all row-major. A GPU before sm_89 is refused by the library itself.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lospmm.gpu.libraries import cublaslt
from lospmm.gpu.libraries.cublas import COMPUTE_32F, place_dense
from lospmm.gpu.libraries.cublaslt import CUDA_R_32F, DenseLayout, DenseProduct
from lospmm.gpu.libraries.library import (
    REAL,
    WORKSPACE_BYTES,
    Buffers,
    Enqueue,
    LibraryFault,
    LibraryTask,
    Variants,
    reserve,
)
from lospmm.gpu.operands import NAN_WORD
from lospmm.gpu.protocol import ALIGNMENT_BYTES
from lospmm.gpu.timing import copies_beyond_l2
from lospmm.problem.accuracy import SMALLEST_NORMAL
from lospmm.problem.values import VALUE_TYPES, ValueType

#: Rows and columns of A must be multiples of this.
MULTIPLE = 16

#: B is also padded with columns of zeros, to a multiple of the first and to no less than the second: for few columns
#: the library may have no algorithm, or a slow one.
PADDINGS = (16, 32)

#: Rows of A whose products are compared.
CHECKED_ROWS = 64

CUDA_R_32I = 10
COMPUTE_32I = 72  # CUBLAS_COMPUTE_32I


class Codes(NamedTuple):
    """How the library takes 8-bit values; types are cudaDataTypes."""

    type: int
    compute: int
    scale: int  # the type of alpha
    alpha: ctypes.c_float | ctypes.c_int32


#: By the name of a ``ValueType``. Codes of E4M3 are so large that without alpha a C of float16 might overflow.
CODES: Mapping[str, Codes] = MappingProxyType(
    {
        "int8": Codes(3, COMPUTE_32I, CUDA_R_32I, ctypes.c_int32(1)),
        "fp8_e4m3": Codes(28, COMPUTE_32F, CUDA_R_32F, ctypes.c_float(2.0**-12)),
    }
)


@contextmanager
def prepare(place: LibraryTask, *, values: str) -> Iterator[Variants]:
    """Yield a variant for each padding of B and each proposal; A is held in ``values``.

    Raises LibraryFault, or GpuFault of the driver.
    """
    n, driver = place.n, place.driver
    if place.matrix.m % MULTIPLE or place.matrix.k % MULTIPLE:
        raise LibraryFault(f"takes m and k in multiples of {MULTIPLE}")
    library = cublaslt.open_library()
    padded = -(-n // PADDINGS[0]) * PADDINGS[0]
    widths = sorted({n, padded, max(padded, PADDINGS[1])})
    with ExitStack() as stack:
        workspace = reserve(stack, driver, WORKSPACE_BYTES)
        operands = CodedOperands(stack, place, VALUE_TYPES[values], widths[-1])
        ways: dict[str, Enqueue] = {}
        refused = LibraryFault("cuBLASLt proposes no algorithm")
        for width in widths:
            try:
                found = cublaslt.proposals(stack, driver, library, operands.product(width), workspace)
            except LibraryFault as fault:
                refused = fault
                continue
            title = "cuBLASLt" if width == n else f"N padded to {width}, cuBLASLt"
            taken = found if place.is_searched else found[:1]
            ways |= {f"{title} {number}": way for number, way in enumerate(taken, start=1)}
        if not ways:
            raise refused
        title = library.title("cuBLASLt", library.functions.cublasLtGetVersion(), 10_000)
        yield Variants(title, ways, error_of=operands.error_of)


class CodedOperands:
    """A, B and C in memory, as many copies as take turns, B with columns of zeros up to ``width``."""

    def __init__(self, stack: ExitStack, place: LibraryTask, values: ValueType, width: int) -> None:
        m, k, n, codes = place.matrix.m, place.matrix.k, place.n, CODES[values.name]
        store, numbers = storing(values), np.roll(values.decoded, -values.zero).astype(np.float64)
        known = np.flatnonzero(np.isfinite(numbers)).astype(np.uint8)
        b = np.zeros((width, k), dtype=np.uint8)
        b[:n] = known[np.random.default_rng(0).integers(len(known), size=(n, k), dtype=np.uint8)]
        self.driver, self.codes, self.k = place.driver, codes, k
        self.c = np.empty((n, m), dtype=np.int32)
        self.from_storage: Callable[[NDArray[Any]], NDArray[Any]] = np.asarray
        self.c_type = CUDA_R_32I
        if codes.compute != COMPUTE_32I:
            self.c = place.dtype.to_storage(np.zeros((n, m), dtype=np.float32))
            self.c_type, self.from_storage = REAL[place.dtype.storage], place.dtype.from_storage
        self.a = place_dense(stack, place, store)
        self.copies = _place_copies(stack, place, b, c_bytes=self.c.itemsize * m * width)
        self.rows = np.unique(np.linspace(0, m - 1, CHECKED_ROWS).astype(np.int64))
        some = np.concatenate([store(place.matrix.dense_rows(row, row + 1)) for row in self.rows])
        of_b, of_a = numbers[b[:n]], codes.alpha.value * numbers[some].T
        self.expected, self.scale = of_b @ of_a, np.maximum(abs(of_b) @ abs(of_a), SMALLEST_NORMAL)

    def product(self, width: int) -> DenseProduct:
        """Return the product of A and so many columns of B."""
        codes, m = self.codes, self.c.shape[1]
        of_a, of_b = DenseLayout(codes.type, self.k, m), DenseLayout(codes.type, self.k, width)
        layouts = of_a, of_b, DenseLayout(self.c_type, m, width)
        return DenseProduct(codes.compute, layouts, self._addresses, codes.alpha, codes.scale, is_a_transposed=True)

    def _addresses(self, copy: int) -> tuple[int, int, int]:
        return self.a[copy % len(self.a)], *self.copies[copy % len(self.copies)]

    def error_of(self, enqueue: Enqueue) -> float:
        """Return the largest relative error of the first and the last copy, in some rows of A and every column."""
        error = 0.0
        for copy in dict.fromkeys((0, len(self.copies) - 1)):
            self.driver.fill(self.copies[copy].c, NAN_WORD, self.c.nbytes // 4)
            enqueue(copy)
            self.driver.download(self.c, self.copies[copy].c)
            off = abs(self.from_storage(self.c[:, self.rows]) - self.expected) / self.scale
            error = max(error, float(np.where(np.isnan(off), np.inf, off).max()))
        return error


def _place_copies(stack: ExitStack, place: LibraryTask, b: NDArray[np.uint8], c_bytes: int) -> list[Buffers]:
    """Return copies of B and C, enough to exceed the L2 cache, if so many take turns."""
    sizes = [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in (b.nbytes, c_bytes)]
    count = min(len(place.copies), copies_beyond_l2(sum(sizes), place.driver.l2_bytes()))
    start = reserve(stack, place.driver, sum(sizes) * count)
    copies = [Buffers(address, address + sizes[0]) for address in range(start, start + sum(sizes) * count, sum(sizes))]
    for copy in copies:
        place.driver.upload(copy.b, b)
    return copies


def storing(values: ValueType) -> Callable[[NDArray[np.float32]], NDArray[np.uint8]]:
    """Return a function that turns rows of stored weights into codes, relative to the code of 0."""

    def store(rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        largest = abs(rows).max(axis=1, keepdims=True, initial=0)
        scaled = rows * np.divide(values.largest, largest, out=np.zeros_like(largest), where=largest > 0)
        return values.codes_of(scaled) - np.uint8(values.zero)

    return store
