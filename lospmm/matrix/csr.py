"""The pruned weight matrix A as an immutable, canonical CSR (``readers.py`` reads files)."""

import hashlib
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadMatrix
from lospmm.settings import settings

if TYPE_CHECKING:
    import scipy.sparse

#: The most rows or columns. A file of a few bytes can claim any shape, and the row offsets of this many rows take
#: 32 MiB; the largest layers (vocabularies, flattened convolutions) stay below a tenth of it.
MAX_DIMENSION = 2**22


@dataclass(frozen=True, slots=True, eq=False)
class SparseMatrix:
    """A, (m, k), float32: columns ascend within a row; no duplicates, no stored zeros, all finite.

    Two matrices are equal if they are the same linear map, whatever order or explicit zeros they were made from;
    ``fingerprint`` is that identity. Make one with ``from_csr``, ``from_coo``, ``from_dense`` or ``readers.read``.
    """

    m: int
    k: int
    indptr: NDArray[np.int64]  # (m + 1,)
    indices: NDArray[np.int32]  # (nnz,)
    data: NDArray[np.float32]  # (nnz,)
    filled_rows: int = field(init=False)  # rows with a nonzero
    largest: float = field(init=False)  # magnitude of a nonzero, 0 without any
    _fingerprint: list[str] = field(init=False, repr=False, default_factory=list)  # cached on first use

    def __post_init__(self) -> None:
        object.__setattr__(self, "filled_rows", int(np.count_nonzero(self.row_nnz)))
        object.__setattr__(self, "largest", float(max(self.data.max(initial=0), -self.data.min(initial=0))))

    @property
    def nnz(self) -> int:
        """Number of nonzeros."""
        return len(self.data)

    @property
    def sparsity(self) -> float:
        """Fraction of zeros, 0 to 1."""
        return 1.0 - self.nnz / (self.m * self.k)

    @property
    def row_nnz(self) -> NDArray[np.int64]:
        """Nonzeros of each row, (m,). Computed on each access: for a few rows, use ``indptr``."""
        return self.indptr[1:] - self.indptr[:-1]

    @property
    def fingerprint(self) -> str:
        """sha256 of the canonical CSR: the shape, then indptr, indices and data as little-endian bytes."""
        if self._fingerprint:
            return self._fingerprint[0]
        digest = hashlib.sha256(b"lospmm-csr-1")
        digest.update(np.array([self.m, self.k], dtype="<i8").tobytes())
        for array, kind in ((self.indptr, "<i8"), (self.indices, "<i4"), (self.data, "<f4")):
            digest.update(np.ascontiguousarray(array, dtype=kind).data)
        self._fingerprint[:] = [digest.hexdigest()]
        return self._fingerprint[0]

    def rows_of_nonzeros(self) -> NDArray[np.int32]:
        """Return the row of each nonzero, (nnz,)."""
        return np.repeat(np.arange(self.m, dtype=np.int32), self.row_nnz)

    def dense_rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return rows ``start`` up to ``stop`` with their zeros, (stop - start, k)."""
        own = slice(int(self.indptr[start]), int(self.indptr[stop]))
        dense = np.zeros((stop - start, self.k), dtype=np.float32)
        dense[np.repeat(np.arange(stop - start), self.row_nnz[start:stop]), self.indices[own]] = self.data[own]
        return dense

    def to_scipy(self) -> "scipy.sparse.csr_array":
        """Return the matrix as a SciPy ``csr_array`` that shares its memory."""
        import scipy.sparse

        return scipy.sparse.csr_array((self.data, self.indices, self.indptr), shape=(self.m, self.k))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SparseMatrix) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)


def transposed(matrix: SparseMatrix) -> SparseMatrix:
    """Return the transpose, (k, m)."""
    return from_coo((matrix.k, matrix.m), matrix.indices, matrix.rows_of_nonzeros(), matrix.data)


def block_diagonal(matrix: SparseMatrix, groups: int) -> SparseMatrix:
    """Return the matrix of a grouped convolution, (m, groups x k): its rows in ``groups`` parts, each beside the last.

    ``groups`` divides m.
    """
    if groups == 1:
        return matrix
    group = matrix.rows_of_nonzeros() // (matrix.m // groups)
    check_shape((matrix.m, matrix.k * groups))
    indices = matrix.indices + group * np.int32(matrix.k)
    return SparseMatrix(matrix.m, matrix.k * groups, matrix.indptr, indices, matrix.data)


def from_coo(
    shape: tuple[int, int], rows: NDArray[np.integer], cols: NDArray[np.integer], values: NDArray[np.floating]
) -> SparseMatrix:
    """Return the canonical matrix of ``values[i]`` at ``(rows[i], cols[i])``, in any order, without zeros.

    Raises BadMatrix for an impossible shape, an index out of range, an entry given twice, or a value that is not a
    finite float32.
    """
    m, k = check_shape(shape)
    for noun, array in (("row indices", rows), ("column indices", cols), ("values", values)):
        _check_array(noun, array)
    if not (rows.ndim == cols.ndim == values.ndim == 1 and len(rows) == len(cols) == len(values)):
        raise BadMatrix(
            f"row indices of shape {rows.shape}, column indices of shape {cols.shape} and values of shape "
            f"{values.shape} do not match"
        )
    check_indices("row index", rows, 0, m - 1)
    check_indices("column index", cols, 0, k - 1)
    # At most MAX_DIMENSION squared: far from the end of int64. In place, since there may be millions.
    position = rows.astype(np.int64)
    position *= k
    np.add(position, cols, out=position, casting="unsafe")
    if np.any(position[1:] <= position[:-1]):
        order = np.argsort(position, kind="stable")
        position, values = position[order], values[order]
        del order
        twice = np.flatnonzero(position[1:] == position[:-1])
        if len(twice):
            row, col = divmod(int(position[twice[0]]), k)
            raise BadMatrix(f"the entry at row {row}, column {col} is given twice; sum or drop duplicates first")
    _check_real(values)
    data = _finite_float32(values, position, k)
    del values
    return _in_order(m, k, position, data)


def _in_order(m: int, k: int, position: NDArray[np.int64], data: NDArray[np.float32]) -> SparseMatrix:
    """Return the matrix of entries at rising positions, row * k + column; zeros are left out. Takes ``position``."""
    kept = data != 0
    if not kept.all():
        position, data = position[kept], data[kept]
    starts = np.arange(m + 1, dtype=np.int64) * k
    indptr = np.searchsorted(position, starts)
    position -= np.repeat(starts[:-1], np.diff(indptr))
    arrays = (indptr, position.astype(np.int32), data)
    for array in arrays:
        array.setflags(write=False)
    return SparseMatrix(m, k, *arrays)


def from_csr(
    shape: tuple[int, int], indptr: NDArray[np.integer], indices: NDArray[np.integer], data: NDArray[np.floating]
) -> SparseMatrix:
    """Return the canonical matrix of compressed rows: row r holds ``indptr[r]`` to ``indptr[r + 1]``.

    Raises BadMatrix as ``from_coo``.
    """
    m, _ = check_shape(shape)
    _check_array("offsets", indptr)
    _check_array("column indices", indices)
    return from_coo(shape, expand_offsets(indptr, m, np.size(indices)), indices, data)


def check_axes(count: int) -> None:
    """Raise BadMatrix unless an array of ``count`` axes is a matrix."""
    if count != 2:
        hint = "; reshape weights of a convolution to out x (in * height * width)" if count in (3, 4) else ""
        raise BadMatrix(f"a matrix has two dimensions, this array has {count}{hint}")


def from_dense(weights: NDArray[np.floating]) -> SparseMatrix:
    """Return the nonzeros of a dense (m, k) array as a matrix. Raises BadMatrix as ``from_coo``."""
    _check_array("weights", weights)
    check_axes(weights.ndim)
    m, k = check_shape(weights.shape)
    _check_real(weights)
    position = np.flatnonzero(weights != 0)  # less than half the time of the weights themselves
    return _in_order(m, k, position, _finite_float32(weights.reshape(-1)[position], position, k))


def expand_offsets(offsets: NDArray[np.integer], lines: int, entries: int) -> NDArray[np.int64]:
    """Return the line (row or column) of each entry, (entries,), given the offset of each line.

    Line i holds entries ``offsets[i]`` to ``offsets[i + 1]``. Raises BadMatrix unless there are ``lines`` + 1 offsets
    that rise from 0 to ``entries``.
    """
    if offsets.shape != (lines + 1,):
        raise BadMatrix(f"{lines} rows (or columns) need {lines + 1} offsets in indptr, not shape {offsets.shape}")
    check_indices("offset", offsets, 0, entries)
    # Compared, not subtracted: differences of unsigned offsets cannot be negative.
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falls):
        raise BadMatrix(f"the offsets in indptr fall after number {falls[0]}; they must rise from 0 to {entries}")
    if offsets[0] != 0 or offsets[-1] != entries:
        raise BadMatrix(f"the offsets in indptr run from {offsets[0]} to {offsets[-1]}, not from 0 to {entries}")
    starts = offsets.astype(np.int64)
    return np.repeat(np.arange(lines, dtype=np.int64), starts[1:] - starts[:-1])


def check_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the sides (m, k) as integers. Raises BadMatrix unless there are two, from 1 to MAX_DIMENSION."""
    try:
        sides = tuple(operator.index(side) for side in shape)
    except TypeError:
        sides = ()
    if len(sides) != 2 or not all(1 <= side <= MAX_DIMENSION for side in sides):
        shown = f"{sides or shape}"[:80]
        raise BadMatrix(f"shape {shown}: a matrix has two sides, each from 1 to {MAX_DIMENSION}")
    return sides[0], sides[1]


def _check_array(noun: str, array: object) -> None:
    """Raise BadMatrix for anything but an array, and for a masked array, whose mask would be lost."""
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        raise BadMatrix(f"the {noun} are of type {type(array).__name__}: give a NumPy array")


def check_indices(noun: str, index: NDArray[np.integer], lowest: int, highest: int) -> None:
    """Raise BadMatrix, naming the first offender, unless all are integers from ``lowest`` to ``highest``."""
    if index.dtype.kind not in "iu":
        raise BadMatrix(f"the {noun} of an entry is an integer, not {index.dtype}")
    wrong = np.flatnonzero((index < lowest) | (index > highest))
    if len(wrong):
        raise BadMatrix(f"{noun} number {wrong[0]} is {index[wrong[0]]}, outside {lowest} to {highest}")


def check_nonzeros(count: int, size: int | None = None) -> None:
    """Raise BadMatrix for more than LOSPMM_MAX_NONZEROS nonzeros; readers call it before they allocate."""
    limit = settings().max_nonzeros
    if count > limit:
        todo = "prune it further, skip it in a layer table, or raise that"
        error = BadMatrix(f"{count} nonzeros, more than the {limit} that LOSPMM_MAX_NONZEROS allows: {todo}")
        error.sparsity = None if size is None else 1.0 - count / size
        raise error


def _check_real(values: NDArray[np.floating]) -> None:
    if values.dtype.kind not in "fiub":
        raise BadMatrix(f"values of type {values.dtype} are not real numbers")


def _finite_float32(values: NDArray[np.floating], position: NDArray[np.int64], k: int) -> NDArray[np.float32]:
    # Too large a value becomes infinite and is refused below; a signalling NaN would warn on its way there.
    with np.errstate(over="ignore", invalid="ignore"):
        data = values.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(data))
    if len(wrong):
        row, col = divmod(int(position[wrong[0]]), k)
        raise BadMatrix(f"row {row}, column {col}: {values[wrong[0]]} is not a finite float32")
    return data
