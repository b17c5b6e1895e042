"""NumPy's ``.npy`` and ``.npz`` from untrusted bytes, and the sparse layouts that an ``.npz`` holds.

Sizes in headers are compared with the bytes present before anything is allocated, and inflation is capped. To read
another sparse layout, add a row to ``LAYOUTS``. Format: numpy.lib.format; layouts: scipy.sparse.save_npz.
"""

import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import PurePosixPath
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadMatrix
from lospmm.matrix.csr import (
    SparseMatrix,
    check_indices,
    check_nonzeros,
    check_shape,
    expand_offsets,
    from_coo,
    from_csr,
)
from lospmm.matrix.mapped import PIECE_BYTES, Content, give_back, member_bytes, nonzeros, opened_content, pieces
from lospmm.settings import settings

Array = NDArray[Any]

Buffer: TypeAlias = Content | memoryview

Arrays = Mapping[str, Array]

MAGIC = b"\x93NUMPY"

#: The longest header read, in bytes. NumPy writes 118 for anything that holds a matrix.
MAX_HEADER_BYTES = 4096

MAX_MEMBERS = 32

#: Magic, version, length and header.
_BEGINNING_BYTES = 12 + MAX_HEADER_BYTES

#: An archive may inflate to FLOOR + RATIO x its own bytes. Real ones inflate less than 20-fold; deflate can do 1032.
INFLATION_FLOOR_BYTES = 1 << 20

INFLATION_RATIO = 100

_DIRECTORY_ENTRY = b"PK\x01\x02"

_DESCR = re.compile(r"""['"]descr['"]\s*:\s*['"]([^'"]*)['"]""")

_FORTRAN = re.compile(r"""['"]fortran_order['"]\s*:\s*(True|False)""")

_SHAPE = re.compile(r"""['"]shape['"]\s*:\s*\(([\d,\s]*)\)""")

_DTYPE = re.compile(r"[<>|=]?(?:f[248]|[iu][1248]|b1|[SU][1-9]\d{0,2})")

#: What the zip and deflate decoders of the standard library raise for damaged bytes.
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError)


def parse(content: Buffer) -> Array:
    """Return the array of a ``.npy`` file, in its byte order, without a copy. Raises BadMatrix."""
    header, start = _header(content)
    dtype, fortran_order, shape = _described(header)
    # A side of zero must not hide an absurd one beside it.
    if len(shape) > 4 or math.prod(max(side, 1) for side in shape) > 2**40:
        shown = f"{shape}" if len(shape) <= 4 else f"of {len(shape)} dimensions"
        raise BadMatrix(
            f"the header promises an array of shape {shown}, and none is read "
            "of more than 4 dimensions or 2**40 numbers; save the matrix again"
        )
    promised = dtype.itemsize * math.prod(shape)
    present = len(content) - start
    if promised != present:
        fault = "truncated" if present < promised else "bytes left over"
        raise BadMatrix(f"{fault}: the header promises {promised} bytes of values, {present} follow it; save it again")
    if promised == 0:
        return np.empty(shape, dtype)
    return np.frombuffer(content, dtype, offset=start).reshape(shape, order="F" if fortran_order else "C")


def read_npz(content: Content) -> SparseMatrix:
    """Return the sparse matrix of an ``.npz``. Raises BadMatrix."""
    return sparse_of(archive(content), content)


def dense_of(arrays: Arrays) -> Array | None:
    """Return the only array of an archive where it is a dense one, as ``numpy.savez(file, weights)`` writes it."""
    if len(arrays) == 1 and (only := next(iter(arrays.values()))).ndim > 1:
        return only
    return None


def sparse_of(arrays: Arrays, content: Content) -> SparseMatrix:
    """Return the matrix of a ``scipy.sparse.save_npz`` file, or of its CSR arrays alone."""
    layout = _text(arrays["format"]) if "format" in arrays else "csr"
    if layout not in LAYOUTS:
        raise BadMatrix(f"sparse format {layout[:20]!r} is none of {', '.join(LAYOUTS)}; convert it with .tocsr()")
    shape = _take(arrays, "shape", dimensions=1)
    if shape.dtype.kind not in "iu" or shape.size > 2:
        raise BadMatrix(f"the shape has {shape.size} sides of type {shape.dtype}, a matrix has two integers")
    return LAYOUTS[layout](check_shape(tuple(shape.tolist())), arrays, content)


def archive(content: Content) -> dict[str, Array]:
    """Return those arrays of an ``.npz`` that a sparse matrix may need, by name, or its only one. Raises BadMatrix."""
    # Each member costs zipfile a directory entry with this signature, so this bounds its memory before it parses.
    if sum(bytes(piece).count(_DIRECTORY_ENTRY) for piece in pieces(content, content)) > MAX_MEMBERS:
        raise BadMatrix(f"the archive has more than {MAX_MEMBERS} members; a sparse matrix needs six")
    try:
        with zipfile.ZipFile(opened_content(content)) as opened:
            members = opened.infolist()
            _check_members(members, len(content))
            return {
                name: _member(opened, member, content)
                for member in members
                if (name := member.filename.removesuffix(".npy")) in _ARRAY_NAMES or len(members) == 1
            }
    except _DAMAGE as error:
        raise BadMatrix(f"truncated or damaged archive ({_one_line(error)}); save or copy it again") from None


def _header(content: Buffer) -> tuple[str, int]:
    """Return the header's text and the offset of the values."""
    beginning = bytes(content[:_BEGINNING_BYTES])
    if not beginning.startswith(MAGIC):
        raise BadMatrix(f"does not begin with the .npy magic but with {beginning[:8]!r}")
    version = beginning[6:8]
    size_bytes = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}.get(version)
    if size_bytes is None:
        raise BadMatrix(f"has .npy version {version!r}, known are 1.0, 2.0 and 3.0; truncated, or save it again")
    text_start = 8 + size_bytes
    length = int.from_bytes(beginning[8:text_start], "little")
    if length > MAX_HEADER_BYTES or text_start + length > len(content):
        raise BadMatrix(f"truncated or wrong header: {length} bytes promised, {max(len(content) - text_start, 0)} left")
    return beginning[text_start : text_start + length].decode("latin-1"), text_start + length


def _described(header: str) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
    """Return dtype, Fortran order and shape; not by NumPy's parser, which evaluates Python literals."""
    descr, fortran, shape = _DESCR.findall(header), _FORTRAN.findall(header), _SHAPE.findall(header)
    if len(fortran) != 1 or len(shape) != 1:
        raise BadMatrix(f"the .npy header is not understood: {header[:80].strip()!r}")
    if len(descr) != 1:
        raise BadMatrix("holds records of several fields; save one array of float32")
    if "O" in descr[0]:
        raise BadMatrix("holds Python objects (a pickle), which are never loaded; save an array of float32")
    if "c" in descr[0]:
        raise BadMatrix(f"holds complex values ({descr[0][:20]!r}); only real ones are supported")
    if not _DTYPE.fullmatch(descr[0]):
        raise BadMatrix(f"holds values of type {descr[0][:20]!r}; save it as float32")
    sides = [side.strip() for side in shape[0].split(",") if side.strip()]
    if any(not side.isdecimal() or len(side) > 18 for side in sides):
        raise BadMatrix(f"the header promises an array of shape ({shape[0][:80]}), which none has; save it again")
    return np.dtype(descr[0]), fortran[0] == "True", tuple(int(side) for side in sides)


def _check_members(members: list[zipfile.ZipInfo], archive_bytes: int) -> None:
    names = [member.filename for member in members]
    if len(set(names)) != len(names):
        raise BadMatrix("two members of the archive have the same name; save it again")
    for member in members:
        name = member.filename
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts:
            raise BadMatrix(
                f"member {name[:80]!r} points outside the archive; save it again with scipy.sparse.save_npz"
            )
        if len(path.parts) != 1 or path.suffix != ".npy":
            raise BadMatrix(f"member {name[:80]!r} is not an array; save the matrix with scipy.sparse.save_npz")
        if member.flag_bits & 0x1:
            raise BadMatrix(f"member {name[:80]!r} is encrypted; save it without a password")
        # Others (bzip2, LZMA) may claim gigabytes for their dictionaries; NumPy writes only these two.
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BadMatrix(f"member {name[:80]!r} is compressed with method {member.compress_type}, not deflate")
    # Uncompressed members take no memory beside the archive; inflated ones do.
    inflated = sum(member.file_size for member in members if member.compress_type != zipfile.ZIP_STORED)
    limit = max(settings().max_upload_bytes - archive_bytes, INFLATION_FLOOR_BYTES)
    allowed = min(INFLATION_FLOOR_BYTES + INFLATION_RATIO * archive_bytes, limit)
    if inflated > allowed:
        raise BadMatrix(
            f"{archive_bytes} bytes would inflate to {inflated}, more than the {allowed} allowed; "
            "save it with compressed=False"
        )


def _member(opened: zipfile.ZipFile, member: zipfile.ZipInfo, archive_content: Content) -> Array:
    with opened.open(member) as stream:  # open() compares the two headers of the member
        if member.compress_type == zipfile.ZIP_STORED:
            content = _stored(member, archive_content)
        else:
            content = _inflated(stream, member.file_size, archive_content)
    try:
        return parse(content)
    except BadMatrix as error:
        raise BadMatrix(f"member {member.filename}: {error}") from None


def _inflated(stream: IO[bytes], size: int, archive_content: Content) -> memoryview:
    """Return the bytes of a member, read in pieces and at most the ``size`` that was checked."""
    content, filled = memoryview(bytearray(size)), 0
    while piece := stream.read(min(PIECE_BYTES, size - filled)):
        content[filled : filled + len(piece)] = piece
        filled += len(piece)
        give_back(archive_content)
    return content[:filled]


def _stored(member: zipfile.ZipInfo, archive_content: Content) -> memoryview:
    """Return the bytes of an uncompressed member in place. Raises BadZipFile if the checksum differs."""
    content, checksum = member_bytes(archive_content, member), 0
    for piece in pieces(archive_content, content):
        checksum = zlib.crc32(piece, checksum)
    if checksum != member.CRC:
        raise zipfile.BadZipFile(f"Bad CRC-32 for file {member.filename!r}")
    return content


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _text(array: Array) -> str:
    if array.ndim != 0 or array.dtype.kind not in "SU":
        raise BadMatrix(f"member format.npy holds {array.dtype} of shape {array.shape}, not the name of a format")
    name = array.item()
    return name.decode("latin-1") if isinstance(name, bytes) else str(name)


def _take(arrays: Arrays, name: str, *, dimensions: int) -> Array:
    if name not in arrays:
        held = ", ".join(arrays)
        raise BadMatrix(
            f"the archive has no array {name!r}{f' (it has: {held})' if held else ', and not one dense array alone'}; "
            "save a sparse matrix with scipy.sparse.save_npz, a dense one with numpy.save"
        )
    if arrays[name].ndim != dimensions:
        raise BadMatrix(f"array {name!r} has {arrays[name].ndim} dimensions, not {dimensions}")
    return arrays[name]


def _entries(arrays: Arrays) -> Array:
    """Return the values of explicit entries: at most LOSPMM_MAX_NONZEROS, since each takes memory."""
    values = _take(arrays, "data", dimensions=1)
    if len(values) > settings().max_nonzeros:
        check_nonzeros(int(np.count_nonzero(values)))
        raise BadMatrix(
            f"{len(values)} entries, zeros among them, more than the {settings().max_nonzeros} that "
            "LOSPMM_MAX_NONZEROS allows: call eliminate_zeros() and save it again"
        )
    return values


def _csr(shape: tuple[int, int], arrays: Arrays, _content: Content) -> SparseMatrix:
    values, cols = _entries(arrays), _take(arrays, "indices", dimensions=1)
    _check_lengths(cols, values)
    return from_csr(shape, _take(arrays, "indptr", dimensions=1), cols, values)


def _csc(shape: tuple[int, int], arrays: Arrays, _content: Content) -> SparseMatrix:
    values, rows = _entries(arrays), _take(arrays, "indices", dimensions=1)
    _check_lengths(rows, values)
    cols = expand_offsets(_take(arrays, "indptr", dimensions=1), shape[1], len(rows))
    return from_coo(shape, rows, cols, values)


def _check_lengths(indices: Array, values: Array) -> None:
    """Raise BadMatrix before offsets are expanded to as many rows as there are indices."""
    if len(indices) != len(values):
        raise BadMatrix(f"{len(indices)} indices and {len(values)} values do not match")


def _coo(shape: tuple[int, int], arrays: Arrays, _content: Content) -> SparseMatrix:
    values = _entries(arrays)
    if "coords" in arrays:
        coords = _take(arrays, "coords", dimensions=2)
        if len(coords) != 2:
            raise BadMatrix(f"array 'coords' has {len(coords)} rows, a matrix has two coordinates")
        return from_coo(shape, coords[0], coords[1], values)
    return from_coo(shape, _take(arrays, "row", dimensions=1), _take(arrays, "col", dimensions=1), values)


def _bsr(shape: tuple[int, int], arrays: Arrays, content: Content) -> SparseMatrix:
    """Read data (blocks, height, width): block b is at block column indices[b] of its indptr row."""
    values, block_cols = _take(arrays, "data", dimensions=3), _take(arrays, "indices", dimensions=1)
    blocks, height, width = values.shape
    if height == 0 or width == 0 or shape[0] % height or shape[1] % width or len(block_cols) != blocks:
        raise BadMatrix(f"{len(block_cols)} block indices and data of shape {values.shape} do not tile shape {shape}")
    check_nonzeros(blocks)  # each holds one nonzero at least
    check_indices("block column", block_cols, 0, shape[1] // width - 1)
    block_rows = expand_offsets(_take(arrays, "indptr", dimensions=1), shape[0] // height, blocks)
    if blocks == 0:
        return from_coo(shape, block_cols, block_cols, values.reshape(-1))
    (block, row, col), found = nonzeros(values, content)
    row += block_rows[block] * height
    col += block_cols.astype(np.int64)[block] * width
    return from_coo(shape, row, col, found)


def _dia(shape: tuple[int, int], arrays: Arrays, content: Content) -> SparseMatrix:
    """Read data (diagonals, length): ``data[d, col]`` is at row ``col - offsets[d]``; the rest is padding."""
    values, offsets = _take(arrays, "data", dimensions=2), _take(arrays, "offsets", dimensions=1)
    if len(offsets) != len(values):
        raise BadMatrix(f"{len(offsets)} offsets for {len(values)} diagonals")
    if len(offsets) >= sum(shape):
        raise BadMatrix(f"{len(offsets)} diagonals, more than the {sum(shape) - 1} of a matrix of shape {shape}")
    check_indices("diagonal", offsets, 1 - shape[0], shape[1] - 1)
    if values.size == 0:
        return from_coo(shape, offsets[:0], offsets[:0], values.reshape(-1))
    (rows, cols), found = nonzeros(values, content)
    np.subtract(cols, offsets.astype(np.int64)[rows], out=rows)  # rows held the diagonals
    inside = (rows >= 0) & (rows < shape[0]) & (cols < shape[1])
    if not inside.all():
        rows, cols, found = rows[inside], cols[inside], found[inside]
    return from_coo(shape, rows, cols, found)


#: Reads a layout, given the shape, the arrays, and the content that holds them.
LAYOUTS: dict[str, Callable[[tuple[int, int], Arrays, Content], SparseMatrix]] = {
    "csr": _csr,
    "csc": _csc,
    "coo": _coo,
    "bsr": _bsr,
    "dia": _dia,
}

_ARRAY_NAMES = frozenset({"format", "shape", "data", "indptr", "indices", "row", "col", "coords", "offsets"})


@lru_cache(maxsize=3)  # kernels of one matrix for several N share it; the next layer's is written ahead
def write_npz(matrix: SparseMatrix) -> bytes:
    """Return the matrix as an ``.npz`` file: 4 bytes a nonzero of float16, else 6; 2 more of a wide matrix; 4 a row."""
    content = io.BytesIO()
    with np.errstate(over="ignore"):
        halves = matrix.data.astype("<f2")
    np.savez(
        content,
        format=np.array(b"csr"),
        shape=np.array([matrix.m, matrix.k], dtype="<i8"),
        indptr=matrix.indptr.astype("<i4"),  # LOSPMM_MAX_NONZEROS or not, a kernel stays far below 2**31 nonzeros
        indices=matrix.indices.astype("<u2" if matrix.k <= 1 << 16 else "<i4"),
        data=halves if np.array_equal(halves, matrix.data) else matrix.data.astype("<f4"),
    )
    return content.getvalue()
