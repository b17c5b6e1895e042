"""Text formats of sparse matrices: MatrixMarket and the Deep Learning Matrix Collection's ``.smtx``.

Headers are compared with the bytes that follow before anything is allocated. For a format that stores only a pattern,
the values are ones. Sources: https://math.nist.gov/MatrixMarket/formats.html and arXiv:2006.10901.
"""

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadMatrix
from lospmm.matrix.csr import SparseMatrix, check_indices, check_nonzeros, check_shape, from_coo, from_csr
from lospmm.matrix.mapped import PIECE_BYTES, Content, give_back

#: Numbers are converted this many bytes at a time: a list of Python floats takes ten times the text's memory.
_CHUNK_BYTES = 1 << 16

#: The longest line of a header, and the longest run of comment lines.
_LINE_BYTES = 1 << 12
_COMMENT_BYTES = 1 << 20

_SPACE = re.compile(rb"\s")
_COUNT = re.compile(r"\d{1,15}")


def read_smtx(content: Content) -> SparseMatrix:
    """Return the pattern of an ``.smtx`` file, with ones for values.

    Line 1: rows, columns, nonzeros; line 2: the row offsets; line 3: the column of each nonzero.
    """
    header, at = _line(content, 0)
    m, k, nnz = _counts(header.replace(",", " ").split(), ("rows", "columns", "nonzeros"))
    check_shape((m, k))
    check_nonzeros(nnz)
    _check_count(content, at, m + 1 + nnz)
    numbers, filled = np.empty(m + 1 + nnz, np.int64), 0
    for piece in _numbers(content, at, len(numbers)):
        numbers[filled : filled + len(piece)] = _whole(piece, filled)
        filled += len(piece)
    offsets, cols = np.split(numbers, [m + 1])
    return from_csr((m, k), offsets, cols, np.ones(nnz, dtype=np.float32))


def read_mtx(content: Content) -> tuple[SparseMatrix, bool]:
    """Return the matrix of a MatrixMarket file, and whether it is a pattern (all values are then ones)."""
    banner, at = _line(content, 0)
    field, symmetry = _banner(banner)
    sizes, at = _skip_comments(content, at)
    m, k, entries = _counts(sizes.split(), ("rows", "columns", "entries"))
    check_shape((m, k))
    check_nonzeros(entries)
    width = 2 if field == "pattern" else 3
    _check_count(content, at, width * entries)
    index, values = np.empty((2, entries), np.int64), np.ones(entries)
    first = 0
    for table in _entries(content, at, entries, width):
        end = first + len(table)
        index[:, first:end] = _whole(table[:, :2].T, first * width, (1, width))
        if width == 3:
            values[first:end] = table[:, 2]
        first = end
    rows: NDArray[np.integer] = _from_one(index[0], m, "row index")
    cols: NDArray[np.integer] = _from_one(index[1], k, "column index")
    del index  # frees its memory now
    if symmetry == "symmetric":
        if m != k:
            raise BadMatrix(f"a symmetric matrix is square, not {m} x {k}")
        rows, cols, values = _mirrored(rows, cols, values)
    return from_coo((m, k), rows, cols, values), field == "pattern"


def _mirrored(
    rows: NDArray[np.integer], cols: NDArray[np.integer], values: NDArray[np.float64]
) -> tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.float64]]:
    """Return the entries of one triangle, and their mirror images without the diagonal."""
    below = rows != cols
    check_nonzeros(len(values) + int(np.count_nonzero(below)))
    return (
        np.concatenate((rows, cols[below])),
        np.concatenate((cols, rows[below])),
        np.concatenate((values, values[below])),
    )


def _banner(line: str) -> tuple[str, str]:
    """Return field and symmetry of the first line."""
    words = line.lower().split()
    if len(words) != 5 or words[1] != "matrix":
        raise BadMatrix(f"line 1, {line[:60]!r}, is not '%%MatrixMarket matrix LAYOUT FIELD SYMMETRY'")
    layout, field, symmetry = words[2:]
    choices = (
        ("layout", layout, ("coordinate",)),
        ("field", field, ("real", "integer", "pattern")),
        ("symmetry", symmetry, ("general", "symmetric")),
    )
    for noun, found, known in choices:
        if found not in known:
            raise BadMatrix(
                f"line 1: {noun} {found[:20]!r} is not supported, only {', '.join(known)}; convert the file"
            )
    return field, symmetry


def _skip_comments(content: Content, at: int) -> tuple[str, int]:
    """Return the first line that is neither empty nor a comment, and the offset of the next."""
    end = at + _COMMENT_BYTES
    while at < min(len(content), end):
        line, at = _line(content, at)
        if line.strip() and not line.startswith("%"):
            return line, at
    raise BadMatrix(f"truncated: no line of sizes in the first {min(len(content), end)} bytes")


def _line(content: Content, at: int) -> tuple[str, int]:
    """Return the line that begins at ``at``, and the offset of the next."""
    newline = content.find(b"\n", at, at + _LINE_BYTES)
    if newline < 0 and len(content) - at > _LINE_BYTES:
        raise BadMatrix(f"byte {at}: a line of the header is longer than {_LINE_BYTES} bytes")
    end = len(content) if newline < 0 else newline
    return content[at:end].decode("latin-1"), end + 1


def _counts(words: list[str], nouns: tuple[str, ...]) -> tuple[int, ...]:
    """Return the whole numbers of the line of sizes."""
    if len(words) != len(nouns) or not all(_COUNT.fullmatch(word) for word in words):
        raise BadMatrix(f"the line of sizes, {' '.join(words)[:60]!r}, does not give {', '.join(nouns)}")
    return tuple(int(word) for word in words)


def _check_count(content: Content, at: int, count: int) -> None:
    """Raise BadMatrix unless the bytes left can hold ``count`` numbers, of two bytes or more each."""
    left = len(content) - at
    if 2 * count - 1 > left:
        raise BadMatrix(f"truncated: the header promises {count} numbers, {max(left, 0)} bytes follow it")


def _entries(content: Content, at: int, count: int, width: int) -> Iterator[NDArray[np.float64]]:
    """Yield ``count`` entries of ``width`` numbers each, in tables of shape (some, width)."""
    rest = np.empty(0)
    for piece in _numbers(content, at, count * width):
        joined = np.concatenate((rest, piece))
        whole = len(joined) // width * width
        yield joined[:whole].reshape(-1, width)
        rest = joined[whole:]


def _numbers(content: Content, at: int, count: int) -> Iterator[NDArray[np.float64]]:
    """Yield the numbers from ``at`` to the end, in pieces. Raises BadMatrix unless there are ``count``."""
    filled = 0
    read_to = at
    while at < len(content):
        end = _chunk_end(content, at)
        words = content[at:end].split()
        if b"_" in content[at:end]:
            raise BadMatrix(f"numbers {filled + 1} and on: an underscore in a number")
        if b"%" in content[at:end]:
            raise BadMatrix(f"numbers {filled + 1} and on: a comment after the line of sizes; move it before that line")
        at = end
        if filled + len(words) > count:
            raise BadMatrix(f"the header promises {count} numbers, more follow it")
        try:
            piece = np.fromiter(map(float, words), np.float64, len(words))
        except ValueError as error:
            raise BadMatrix(f"numbers {filled + 1} to {filled + len(words)}: {str(error)[:80]}") from None
        yield piece
        filled += len(words)
        if at - read_to > PIECE_BYTES:
            give_back(content)
            read_to = at
    if filled != count:
        raise BadMatrix(f"truncated: the header promises {count} numbers, {filled} follow it")


def _chunk_end(content: Content, at: int) -> int:
    """Return an offset about _CHUNK_BYTES after ``at`` that does not split a number."""
    if at + _CHUNK_BYTES >= len(content):
        return len(content)
    space = _SPACE.search(content, at + _CHUNK_BYTES, at + _CHUNK_BYTES + _LINE_BYTES)
    if space is None:
        raise BadMatrix(f"byte {at + _CHUNK_BYTES}: a number is longer than {_LINE_BYTES} bytes")
    return space.end()


def _whole(numbers: NDArray[np.float64], before: int, steps: tuple[int, ...] = (1,)) -> NDArray[np.int64]:
    """Return ``numbers`` as integers. Raises BadMatrix naming the first that is none.

    ``before`` numbers precede them in the file; along each axis they are ``steps`` apart.
    """
    wrong = np.argwhere(~(np.abs(numbers) < 2**53) | (numbers != np.floor(numbers)))
    if len(wrong):
        number = before + int(wrong[0] @ steps) + 1
        raise BadMatrix(f"number {number} after the header, {numbers[tuple(wrong[0])]}, is not a whole number")
    return numbers.astype(np.int64)


def _from_one(index: NDArray[np.int64], side: int, noun: str) -> NDArray[np.int32]:
    """Return 0-based indices for the 1-based ones of MatrixMarket."""
    check_indices(noun, index, 1, side)
    index -= 1
    return index.astype(np.int32)
