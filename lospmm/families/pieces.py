"""A as bits and values: the format that kernels with few columns of B and with many of them read (``bitmap``).

A piece has ``tiles`` x 16 rows and ``depth`` columns. Each element takes a bit, and a nonzero its value: with 16-bit
values 1.13 bytes an element at 50 % zeros, where csr and the dense A take 2. Or two adjacent elements take a bit, and
two values if either is not 0, which takes fewer instructions to read: 1.56 bytes, or 1.41 with columns permuted so that
nonzeros pair up. Values may be codes of 8 bits (``problem.values``). docs/decisions/0024 explains the layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.dtype import Dtype
from lospmm.problem.problem import ceil_div
from lospmm.problem.values import ValueType, pair_bytes

#: Rows of A of a tensor core product; columns of A between two reads of bits; and columns of A of a product.
TILE_ROWS, UNIT, STEP = 16, 64, 16

#: Rows of B, 16 bytes each, that lie in different banks.
BANKS = 8

#: Cells that are packed at a time, which bounds the memory.
CELLS_AT_ONCE = 2**24

#: Groups of rows, and pieces of each, from which the pairs of all of A are estimated.
SAMPLED_GROUPS, SAMPLED_PIECES = 4, 64

#: The room for a piece in shared memory is a multiple of this, so that few templates are compiled.
PIECE_UNIT_BYTES = 256

#: Of the layout for every N: the fewest and the most pieces of a row of tiles at known places; and the multiple that
#: rows are padded to, which suits the blocks of all kernels.
LEAST_FIRSTS, MOST_FIRSTS, SHARED_ROWS = 4, 8, 128


@dataclass(frozen=True, slots=True)
class PieceShape:
    """The shape of a piece, the elements of a bit, and whether odd columns have changed places."""

    tiles: int
    depth: int
    per_bit: int = 2
    is_paired: bool = False

    @property
    def rows(self) -> int:
        """Rows of A."""
        return self.tiles * TILE_ROWS

    @property
    def words(self) -> int:
        """Words of bits."""
        return self.rows * self.depth // (32 * self.per_bit)

    @property
    def head_bytes(self) -> int:
        """Bytes of a piece before its values: bits, and which columns are at odd places."""
        return 4 * self.words + (self.depth // 2 if self.is_paired else 0)

    def value_bytes(self, values: ValueType | None) -> int:
        """Return the bytes of the values of a bit."""
        return pair_bytes(values) * self.per_bit // 2


@lru_cache(maxsize=4)
def counts(matrix: SparseMatrix, per_bit: int) -> NDArray[np.int32]:
    """Return how often ``per_bit`` adjacent elements have a nonzero, by 16 rows x 64 columns of A, (tiles, units)."""
    tall, units = ceil_div(matrix.m, TILE_ROWS), ceil_div(matrix.k, UNIT)
    found = np.zeros((tall, units), dtype=np.int32)
    for tile in range(tall):
        first, after = tile * TILE_ROWS, min((tile + 1) * TILE_ROWS, matrix.m)
        row = np.repeat(np.arange(after - first), np.diff(matrix.indptr[first : after + 1]))
        held = np.zeros((TILE_ROWS, units * UNIT // per_bit), dtype=bool)
        held[row, matrix.indices[matrix.indptr[first] : matrix.indptr[after]] // per_bit] = True
        found[tile] = held.reshape(TILE_ROWS, units, UNIT // per_bit).sum(axis=(0, 2))
    return found


def piece_bytes(
    counts: NDArray[np.int32], shape: PieceShape, share: float = 1.0, *, values: ValueType | None = None
) -> int:
    """Return the bytes of the largest piece.

    ``share`` is that of the pairs of A that are left in the order of ``odd_columns``, which adds none.
    """
    held = _padded(_padded(counts, shape.tiles).T, shape.depth // UNIT)  # (units, tiles)
    of_pieces = held.reshape(len(held) * UNIT // shape.depth, shape.depth // UNIT, -1, shape.tiles).sum(axis=(1, 3))
    largest = shape.head_bytes + shape.value_bytes(values) * int(share * of_pieces.max())
    return ceil_div(largest, PIECE_UNIT_BYTES) * PIECE_UNIT_BYTES


def _padded(array: NDArray[Any], multiple: int) -> NDArray[Any]:
    missing = -len(array) % multiple
    return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)]) if missing else array


def _stored(matrix: SparseMatrix, dtype: Dtype, values: ValueType | None) -> NDArray[Any]:
    """Return each nonzero as it is stored, exclusive or with what 0 is stored as."""
    if values is not None:
        return values.codes(matrix) ^ np.uint8(values.zero)
    stored: NDArray[np.uint16] = dtype.to_storage(dtype.rounded(matrix.data)).view(np.uint16)
    return np.where(stored == 0x8000, np.uint16(0), stored)


def pack_pieces(
    matrix: SparseMatrix, dtype: Dtype, shape: PieceShape, multiple: int, values: ValueType | None = None
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the start of each piece in units of 16 bytes, and the pieces: bits of the rows, places of columns, values.

    ``values`` are what A is held in; None: the ``dtype``. Pieces are in the order of rows and then columns. A lane's
    part of a product is rows r and r + 8 of lane 4 r + t, columns 2 t and 2 t + 8, two of each. A word has the bits of
    eight lanes: all of them, a lane's beside each other, where a bit is of two elements, else those of half of the
    columns, a lane's in the same place of each byte. Codes of single bits are stored exclusive or with that of 0.
    If paired, a byte for each odd column says which column of the piece is there. Behind A are rows of zeros, up to a
    multiple of ``multiple`` rows.
    """
    pieces, tall = ceil_div(matrix.k, shape.depth), ceil_div(matrix.m, multiple) * multiple
    order = odd_columns(matrix, shape) if shape.is_paired else None
    stored = _stored(matrix, dtype, values)
    zeros = 0 if values is None or shape.per_bit == 1 else values.zero * 0x101
    parts, sizes = [], []
    for row, rows in _batches(tall, pieces, shape):
        cells = _cells(matrix, row, rows, stored[_nonzeros(matrix, row, rows)], shape)
        heads: tuple[NDArray[np.uint32], ...] = ()
        if order is not None:
            first = row // shape.rows
            own = np.resize(np.arange(1, shape.depth, 2, dtype=np.uint8), (len(cells), pieces, shape.depth // 2))
            if first < len(order):
                own[: len(order) - first] = order[first : first + len(cells)]
            cells[..., 1::2] = np.take_along_axis(cells, own[:, np.newaxis], axis=3)
            heads = (own.reshape(len(cells) * pieces, -1).view("<u4"),)
        ordered = _in_order(cells, shape)
        held = ordered != 0
        head = np.concatenate([_bits(held, shape), *heads], axis=1)
        lengths, of_word = held.sum(axis=1), 4 // ordered.itemsize
        words = -(-(head.shape[1] * of_word + lengths) // (4 * of_word)) * 4
        begins = np.cumsum(words) - words
        found = np.zeros(int(words.sum()), dtype=np.uint32)
        found[begins[:, np.newaxis] + np.arange(head.shape[1])] = head
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        at = np.repeat((begins + head.shape[1]) * of_word, lengths) + within
        found.view(ordered.dtype)[at] = ordered[held] ^ ordered.dtype.type(zeros)
        parts.append(found)
        sizes.append(words // 4)
    starts = np.zeros(tall // shape.rows * pieces + 1, dtype=np.uint32)
    np.cumsum(np.concatenate(sizes), out=starts[1:])
    return starts, np.concatenate(parts)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """A in pieces: ``arrays`` of the first pieces, of where the others begin, and of these; and the largest's bytes."""

    arrays: tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]
    largest: int


@lru_cache(maxsize=1)  # plans and N that read A alike are built one after the other
def laid_out(
    matrix: SparseMatrix,
    dtype: Dtype,
    shape: PieceShape,
    multiple: int,
    firsts: int,
    values: ValueType | None = None,
) -> Pieces:
    """Return the pieces with the first ``firsts`` of each row of tiles at known places, ``largest`` bytes each.

    A first piece has no bytes among the others, whose starts are in units of 16 bytes. ``multiple`` as in
    ``pack_pieces``.
    """
    pieces = ceil_div(matrix.k, shape.depth)
    starts, data = pack_pieces(matrix, dtype, shape, multiple, values)
    largest = ceil_div(16 * int(np.diff(starts.astype(np.int64)).max()), PIECE_UNIT_BYTES) * PIECE_UNIT_BYTES
    of_rows = starts.astype(np.int64)[:-1].reshape(-1, pieces) * 4
    bounds = np.column_stack([of_rows, np.append(of_rows[1:, 0], len(data))])  # in words
    first = np.zeros((len(bounds), firsts, largest // 4), dtype=np.uint32)
    count = min(firsts, pieces)
    for own, begins in zip(first, bounds, strict=True):
        for place in range(count):
            piece = data[begins[place] : begins[place + 1]]
            own[place, : len(piece)] = piece
    others = [data[begins[count] : begins[-1]] for begins in bounds]
    sizes = np.diff(bounds, axis=1) // 4
    sizes[:, :count] = 0
    return Pieces((first, np.append(0, np.cumsum(sizes)).astype(np.uint32), np.concatenate(others)), largest)


def _in_order(cells: NDArray[Any], shape: PieceShape) -> NDArray[Any]:
    """Return the values of a bit, one number, in the order of ``pack_pieces``; each line is a piece."""
    # (group, tile, half of the rows, row, piece, unit, step, half of the columns, lane of four, bit of two)
    sides = (-1, shape.tiles, 2, 8, cells.shape[2], shape.depth // UNIT, UNIT // STEP, 2, 4, 2 // shape.per_bit)
    order = (0, 4, 5, 1, 6, 7, 3, 8, 2, 9) if shape.per_bit == 1 else (0, 4, 5, 1, 6, 3, 8, 7, 2, 9)
    numbers = cells.view(f"<u{shape.per_bit * cells.itemsize}").reshape(sides)
    return numbers.transpose(order).reshape(-1, 32 * shape.words)


def _bits(held: NDArray[np.bool_], shape: PieceShape) -> NDArray[np.uint32]:
    """Return the words of bits of values in the order of ``_in_order``, a line for each piece."""
    if shape.per_bit == 1:
        held = held.reshape(-1, shape.words, 8, 4).swapaxes(2, 3).reshape(held.shape)
    return np.packbits(held, axis=1, bitorder="little").view("<u4")


@lru_cache(maxsize=8)
def odd_columns(matrix: SparseMatrix, shape: PieceShape) -> NDArray[np.uint8]:
    """Return the column of a piece at each of its odd places: (groups of rows, pieces, depth / 2).

    Most pairs are 0 where nonzeros stand beside nonzeros: the paper's regrouping, of columns and within a piece. A
    column stays among those with the same remainder of 8, so that rows of B that are read at once lie in different
    banks of shared memory.
    """
    tall, pieces = ceil_div(matrix.m, shape.rows) * shape.rows, ceil_div(matrix.k, shape.depth)
    found = [_matched(_cells(matrix, row, rows, np.True_, shape)) for row, rows in _batches(tall, pieces, shape)]
    return np.concatenate(found)


@lru_cache(maxsize=8)
def share_of_pairs(matrix: SparseMatrix, shape: PieceShape) -> float:
    """Estimate the share of the pairs with a nonzero that is left in the order of ``odd_columns``, from a sample."""
    groups = ceil_div(matrix.m, shape.rows)
    before = after = 0
    for group in range(0, groups, ceil_div(groups, SAMPLED_GROUPS)):
        cells = _cells(matrix, group * shape.rows, shape.rows, np.True_, shape)[:, :, :SAMPLED_PIECES]
        before += int(np.count_nonzero(cells[..., ::2] | cells[..., 1::2]))
        odd = np.take_along_axis(cells, _matched(cells)[:, np.newaxis], axis=3)
        after += int(np.count_nonzero(cells[..., ::2] | odd))
    return float(after / before) if before else 1.0


def _matched(cells: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return ``odd_columns`` of some groups: an assignment of odd columns to even ones for each remainder of 8."""
    from scipy.optimize import linear_sum_assignment  # a program that runs kernels has no SciPy

    groups, height, pieces, depth = cells.shape
    pairs = cells.astype(np.float32).reshape(groups, height, pieces, depth // BANKS, BANKS // 2, 2)
    even, odd = pairs[..., 0].transpose(0, 2, 4, 3, 1), pairs[..., 1].transpose(0, 2, 4, 1, 3)
    both = (even @ odd).reshape(-1, depth // BANKS, depth // BANKS)  # rows with both, of each two columns
    chosen = np.array([linear_sum_assignment(one, maximize=True)[1] for one in both])
    eights = chosen.reshape(groups, pieces, BANKS // 2, depth // BANKS).swapaxes(2, 3)
    found = eights * BANKS + np.arange(1, BANKS, 2)
    return found.astype(np.uint8).reshape(groups, pieces, depth // 2)


def _batches(tall: int, pieces: int, shape: PieceShape) -> Iterator[tuple[int, int]]:
    """Yield the first of some rows, and how many: whole groups, as many cells as are packed at a time."""
    at_once = max(1, CELLS_AT_ONCE // (shape.rows * pieces * shape.depth)) * shape.rows
    for row in range(0, tall, at_once):
        yield row, min(at_once, tall - row)


def _nonzeros(matrix: SparseMatrix, row: int, rows: int) -> slice:
    """Return which nonzeros are those of ``rows`` rows from ``row`` on, which may lie behind the last one."""
    return slice(*matrix.indptr[[min(row, matrix.m), min(row + rows, matrix.m)]])


def _cells(
    matrix: SparseMatrix, row: int, rows: int, values: NDArray[Any] | np.bool_, shape: PieceShape
) -> NDArray[Any]:
    """Spread values of ``_nonzeros`` in the shape of pieces: (groups, rows of a piece, pieces, depth)."""
    pieces = ceil_div(matrix.k, shape.depth)
    cells = np.zeros((rows, pieces * shape.depth), dtype=values.dtype)
    lengths = np.diff(matrix.indptr[row : row + rows + 1])
    cells[np.repeat(np.arange(len(lengths)), lengths), matrix.indices[_nonzeros(matrix, row, rows)]] = values
    return cells.reshape(-1, shape.rows, pieces, shape.depth)
