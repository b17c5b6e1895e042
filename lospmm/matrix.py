"""The pruned weight matrix A as a frozen, canonical CSR (readers of files are in ``readers.py``)."""

import hashlib
from dataclasses import dataclass

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from lospmm.errors import BadMatrix

#: Indices are stored in 32 bits, and the emitted code numbers rows and columns with them.
MAX_DIMENSION = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class SparseMatrix:
    """A of shape (m, k): float32 values, columns ascending within a row, no duplicate, no stored zero, all finite.

    Two matrices are equal when they are the same function, whatever order or explicit zeros they were made from;
    ``fingerprint`` is that identity. Make one with ``from_csr``, ``from_coo``, ``from_dense`` or ``readers.read``.
    """

    m: int
    k: int
    indptr: NDArray[np.int64]  # (m + 1,)
    indices: NDArray[np.int32]  # (nnz,)
    data: NDArray[np.float32]  # (nnz,)

    @property
    def nnz(self) -> int:
        return len(self.data)

    @property
    def sparsity(self) -> float:
        """The share of zeros, 0 to 1."""
        return 1.0 - self.nnz / (self.m * self.k)

    @property
    def row_nnz(self) -> NDArray[np.int64]:
        """Nonzeros of each row, (m,)."""
        return self.indptr[1:] - self.indptr[:-1]

    @property
    def fingerprint(self) -> str:
        """sha256 over the canonical CSR: the shape, then indptr, indices and data as little-endian bytes."""
        digest = hashlib.sha256(b"lospmm-csr-1")
        digest.update(np.array([self.m, self.k], dtype="<i8").tobytes())
        for array, kind in ((self.indptr, "<i8"), (self.indices, "<i4"), (self.data, "<f4")):
            digest.update(np.ascontiguousarray(array, dtype=kind).tobytes())
        return digest.hexdigest()

    def rows_of_nonzeros(self) -> NDArray[np.int32]:
        """The row of each nonzero, (nnz,)."""
        return np.repeat(np.arange(self.m, dtype=np.int32), self.row_nnz)

    def to_scipy(self) -> scipy.sparse.csr_array:
        return scipy.sparse.csr_array((self.data, self.indices, self.indptr), shape=(self.m, self.k))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SparseMatrix) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)


def from_coo(
    shape: tuple[int, int], rows: NDArray[np.integer], cols: NDArray[np.integer], values: NDArray[np.floating]
) -> SparseMatrix:
    """The canonical matrix of ``values[i]`` at ``(rows[i], cols[i])``, in any order; zeros are dropped.

    Raises BadMatrix for an impossible shape, an index out of range, an entry given twice, or a value that is not
    a finite float32.
    """
    m, k = (int(side) for side in shape)
    if not (0 < m <= MAX_DIMENSION and 0 < k <= MAX_DIMENSION):
        raise BadMatrix(f"shape ({m}, {k}): both sides must be from 1 to {MAX_DIMENSION}")
    if not (len(rows) == len(cols) == len(values)):
        raise BadMatrix(f"{len(rows)} row indices, {len(cols)} column indices and {len(values)} values do not match")
    for name, index, side in (("row", rows, m), ("column", cols, k)):
        wrong = np.flatnonzero((index < 0) | (index >= side))
        if len(wrong):
            raise BadMatrix(f"entry {wrong[0]}: {name} index {index[wrong[0]]} is outside 0 to {side - 1}")
    position = rows.astype(np.int64) * k + cols
    if np.any(position[1:] <= position[:-1]):
        order = np.argsort(position, kind="stable")
        position, values = position[order], values[order]
        twice = np.flatnonzero(position[1:] == position[:-1])
        if len(twice):
            row, col = divmod(int(position[twice[0]]), k)
            raise BadMatrix(f"the entry at row {row}, column {col} is given twice")
    data = _finite_float32(values, position, k)
    kept = data != 0
    position, data = position[kept], data[kept]
    row, col = np.divmod(position, k)
    indptr = np.concatenate(([0], np.cumsum(np.bincount(row, minlength=m))))
    arrays = (indptr.astype(np.int64), col.astype(np.int32), data)
    for array in arrays:
        array.setflags(write=False)
    return SparseMatrix(m, k, *arrays)


def from_csr(
    shape: tuple[int, int], indptr: NDArray[np.integer], indices: NDArray[np.integer], data: NDArray[np.floating]
) -> SparseMatrix:
    """As ``from_coo``, from compressed rows: row r holds entries ``indptr[r]`` to ``indptr[r + 1]``."""
    m = int(shape[0])
    if m <= 0 or len(indptr) != m + 1:
        raise BadMatrix(f"a matrix of {m} rows needs {m + 1} row offsets, not {len(indptr)}")
    starts = indptr.astype(np.int64)
    lengths = starts[1:] - starts[:-1]
    if indptr[0] != 0 or np.any(lengths < 0) or indptr[-1] != len(indices):
        raise BadMatrix(f"the row offsets must rise from 0 to the number of entries, {len(indices)}")
    return from_coo(shape, np.repeat(np.arange(m, dtype=np.int64), lengths), indices, data)


def from_dense(weights: NDArray[np.floating]) -> SparseMatrix:
    """The nonzeros of a dense (m, k) array."""
    if weights.ndim != 2:
        raise BadMatrix(f"a matrix has two dimensions, this array has {weights.ndim}")
    rows, cols = np.nonzero(weights)
    return from_coo(weights.shape, rows, cols, weights[rows, cols])


def _finite_float32(values: NDArray[np.floating], position: NDArray[np.int64], k: int) -> NDArray[np.float32]:
    if values.dtype.kind not in "fiub":
        raise BadMatrix(f"values of type {values.dtype} are not real numbers")
    with np.errstate(over="ignore"):
        data = values.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(data))
    if len(wrong):
        row, col = divmod(int(position[wrong[0]]), k)
        raise BadMatrix(f"row {row}, column {col}: {values[wrong[0]]} is not a finite float32")
    return data
