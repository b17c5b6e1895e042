"""The two text formats of sparse matrices: MatrixMarket (``.mtx``) and the Deep Learning Matrix Collection (``.smtx``).

Headers are compared with the bytes that follow before anything is allocated. A format that stores a pattern only gives
ones and says so. Sources: https://math.nist.gov/MatrixMarket/formats.html and arXiv:2006.10901.
"""

import re

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadMatrix
from lospmm.matrix import SparseMatrix, check_indices, check_nonzeros, check_shape, from_coo, from_csr, from_dense

#: Numbers are converted this many bytes at a time: a list of Python floats takes ten times the text's memory.
_CHUNK_BYTES = 1 << 16

#: The longest line of a header, and the longest run of comment lines.
_LINE_BYTES = 1 << 12
_COMMENT_BYTES = 1 << 20

_SPACE = re.compile(rb"\s")
_COUNT = re.compile(r"\d{1,15}")


def read_smtx(content: bytes) -> SparseMatrix:
    """The pattern of an ``.smtx`` file, with ones for values.

    Line 1: rows, columns, nonzeros; line 2: the row offsets; line 3: the column of each nonzero.
    """
    header, at = _line(content, 0)
    m, k, nnz = _counts(header.replace(",", " ").split(), ("rows", "columns", "nonzeros"))
    check_shape((m, k))
    check_nonzeros(nnz)
    offsets, cols = np.split(_whole(_numbers(content, at, m + 1 + nnz)), [m + 1])
    return from_csr((m, k), offsets, cols, np.ones(nnz, dtype=np.float32))


def read_mtx(content: bytes) -> tuple[SparseMatrix, bool]:
    """The matrix of a MatrixMarket file, and whether it is a pattern (then its values are ones)."""
    banner, at = _line(content, 0)
    layout, field, symmetry = _banner(banner)
    sizes, at = _skip_comments(content, at)
    if layout == "array":
        shape = check_shape(_counts(sizes.split(), ("rows", "columns")))
        return _array(content, at, shape, symmetric=symmetry == "symmetric"), False
    m, k, entries = _counts(sizes.split(), ("rows", "columns", "entries"))
    check_shape((m, k))
    check_nonzeros(entries)
    width = 2 if field == "pattern" else 3
    table = _numbers(content, at, width * entries).reshape(entries, width)
    rows, cols = _from_one(table[:, 0], m, "row index"), _from_one(table[:, 1], k, "column index")
    values = table[:, 2] if width == 3 else np.ones(entries)
    if symmetry == "symmetric":
        _check_square((m, k))
        below = rows != cols
        rows, cols = np.concatenate((rows, cols[below])), np.concatenate((cols, rows[below]))
        values = np.concatenate((values, values[below]))
        check_nonzeros(len(values))
    return from_coo((m, k), rows, cols, values), field == "pattern"


def _array(content: bytes, at: int, shape: tuple[int, int], *, symmetric: bool) -> SparseMatrix:
    """A dense matrix column by column; a symmetric one gives only its lower triangle."""
    m, k = shape
    if not symmetric:
        weights = _numbers(content, at, m * k).reshape(shape, order="F")
    else:
        _check_square(shape)
        triangle = _numbers(content, at, m * (m + 1) // 2)
        weights = np.empty(shape)
        ends = np.cumsum(np.arange(m, 0, -1))[:-1]
        for col, below in enumerate(np.split(triangle, ends)):
            weights[col:, col] = weights[col, col:] = below
    check_nonzeros(int(np.count_nonzero(weights)))
    return from_dense(weights)


def _banner(line: str) -> tuple[str, str, str]:
    """Layout, field and symmetry of the first line."""
    words = line.lower().split()
    if len(words) != 5 or words[1] != "matrix":
        raise BadMatrix(f"line 1, {line[:60]!r}, is not '%%MatrixMarket matrix LAYOUT FIELD SYMMETRY'")
    layout, field, symmetry = words[2:]
    choices = (
        ("layout", layout, ("coordinate", "array")),
        ("field", field, ("real", "integer", "pattern") if layout == "coordinate" else ("real", "integer")),
        ("symmetry", symmetry, ("general", "symmetric")),
    )
    for noun, found, known in choices:
        if found not in known:
            raise BadMatrix(
                f"line 1: {noun} {found[:20]!r} is not supported, only {', '.join(known)}; convert the file"
            )
    return layout, field, symmetry


def _skip_comments(content: bytes, at: int) -> tuple[str, int]:
    """The first line that is neither empty nor a comment, and where the next begins."""
    end = at + _COMMENT_BYTES
    while at < min(len(content), end):
        line, at = _line(content, at)
        if line.strip() and not line.startswith("%"):
            return line, at
    raise BadMatrix(f"truncated: no line of sizes in the first {min(len(content), end)} bytes")


def _line(content: bytes, at: int) -> tuple[str, int]:
    """The line that begins at ``at`` and where the next begins."""
    newline = content.find(b"\n", at, at + _LINE_BYTES)
    if newline < 0 and len(content) - at > _LINE_BYTES:
        raise BadMatrix(f"byte {at}: a line of the header is longer than {_LINE_BYTES} bytes")
    end = len(content) if newline < 0 else newline
    return content[at:end].decode("latin-1"), end + 1


def _counts(words: list[str], nouns: tuple[str, ...]) -> tuple[int, ...]:
    """The whole numbers of a line of sizes."""
    if len(words) != len(nouns) or not all(_COUNT.fullmatch(word) for word in words):
        raise BadMatrix(f"the line of sizes, {' '.join(words)[:60]!r}, does not give {', '.join(nouns)}")
    return tuple(int(word) for word in words)


def _numbers(content: bytes, at: int, count: int) -> NDArray[np.float64]:
    """The numbers from ``at`` to the end, exactly ``count`` of them, (count,)."""
    left = len(content) - at
    if 2 * count - 1 > left:  # each takes a digit and a space at least
        raise BadMatrix(f"truncated: the header promises {count} numbers, {max(left, 0)} bytes follow it")
    numbers = np.empty(count)
    filled = 0
    while at < len(content):
        end = _chunk_end(content, at)
        words = content[at:end].split()
        if b"_" in content[at:end]:
            raise BadMatrix(f"among the numbers from {filled + 1}: an underscore, which no number of this format has")
        at = end
        if filled + len(words) > count:
            raise BadMatrix(f"the header promises {count} numbers, more follow it")
        try:
            numbers[filled : filled + len(words)] = [float(word) for word in words]
        except ValueError as error:
            raise BadMatrix(
                f"among the numbers from {filled + 1} to {filled + len(words)}: {str(error)[:80]}"
            ) from None
        filled += len(words)
    if filled != count:
        raise BadMatrix(f"truncated: the header promises {count} numbers, {filled} follow it")
    return numbers


def _chunk_end(content: bytes, at: int) -> int:
    """A place about _CHUNK_BYTES after ``at`` that does not split a number."""
    if at + _CHUNK_BYTES >= len(content):
        return len(content)
    space = _SPACE.search(content, at + _CHUNK_BYTES, at + _CHUNK_BYTES + _LINE_BYTES)
    if space is None:
        raise BadMatrix(f"byte {at + _CHUNK_BYTES}: a number is longer than {_LINE_BYTES} bytes")
    return space.end()


def _whole(numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    wrong = np.flatnonzero(~(np.abs(numbers) < 2**53) | (numbers != np.floor(numbers)))
    if len(wrong):
        raise BadMatrix(f"number {wrong[0] + 1} after the header, {numbers[wrong[0]]}, is not a whole number")
    return numbers.astype(np.int64)


def _from_one(numbers: NDArray[np.float64], side: int, noun: str) -> NDArray[np.int64]:
    """Indices counted from 1, as MatrixMarket does, to indices counted from 0."""
    index = _whole(numbers)
    check_indices(noun, index, 1, side)
    return index - 1


def _check_square(shape: tuple[int, int]) -> None:
    if shape[0] != shape[1]:
        raise BadMatrix(f"a symmetric matrix is square, not {shape[0]} x {shape[1]}")
