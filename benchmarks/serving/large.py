"""Files just below LOSPMM_MAX_UPLOAD_BYTES, each made so that reading it takes much memory: the most nonzeros, entries
in no order, more zeros than nonzeros, numbers in another byte order, the shortest text for a number.

All but those of ``SOUND`` are refused, most of them for what stands at their end.
"""

import zipfile
from collections.abc import Callable, Mapping

import numpy as np

from benchmarks.serving.files import bomb
from tests.fixtures.files import npy, npz, safetensors, tensor

MEGABYTES = 255
BYTES = MEGABYTES << 20

#: LOSPMM_MAX_NONZEROS of a service, and the most rows or columns.
NONZEROS, SIDE = 4_000_000, 2**22

_REAL = b"%%MatrixMarket matrix coordinate real general\n"


def _dense(dtype: str, *, last: float = np.nan, count: int = NONZEROS) -> np.ndarray:
    """As many elements as fit, with ``count`` nonzeros at equal distances, and ``last`` at the end; (1024, columns)."""
    elements = BYTES // np.dtype(dtype).itemsize // 1024 * 1024
    weights = np.zeros(elements, dtype)
    weights[:: -(-elements // count)][:count] = 1
    weights[-1] = last
    return weights.reshape(1024, -1)


def _array(weights: np.ndarray, *, by_columns: bool = False) -> bytes:
    return npy(weights.shape, weights.dtype.str, weights.tobytes(), fortran_order=by_columns)


def _stored(layout: bytes, shape: tuple[int, int], **arrays: np.ndarray) -> bytes:
    """An archive in which nothing is compressed, filled up with an array that nobody needs."""
    members = [("format.npy", npy((), f"|S{len(layout)}", layout)), ("shape.npy", _array(np.array(shape, "<i8")))]
    members += [(f"{name}.npy", _array(array)) for name, array in arrays.items()]
    left = BYTES - sum(len(content) for _, content in members)
    unused = "offsets.npy" if layout in (b"csr", b"coo") else "row.npy"
    return npz([*members, (unused, npy((left,), "|b1", bytes(left)))] if left > 0 else members, zipfile.ZIP_STORED)


def _csr(entries: int, kind: str = "<f8", rows: int = 1000) -> bytes:
    """Every entry many times over."""
    offsets, indices = np.arange(rows + 1, dtype="<i8") * (entries // rows), np.zeros(entries, "<i8")
    return _stored(b"csr", (rows, SIDE), indptr=offsets, indices=indices, data=np.ones(entries, kind))


def _explicit_zeros() -> bytes:
    """Entries of two bytes each, all of them zero."""
    entries = BYTES // 2 - 1000
    offsets = np.array([0, entries], "<i8")
    return _stored(b"csr", (1, 256), indptr=offsets, indices=np.zeros(entries, "u1"), data=np.zeros(entries, "|b1"))


def _indices_without_values() -> bytes:
    indices = np.zeros(BYTES - 10_000, "u1")
    offsets = np.array([0, len(indices)], "<i8")
    return _stored(b"csr", (1, 256), indptr=offsets, indices=indices, data=np.ones(9, "<f4"))


def _coo(*, last: float) -> bytes:
    """As many entries as may be, the last place first, in as many rows and columns as may be."""
    place = np.arange(NONZEROS, dtype="<i8")[::-1]
    values = np.full(NONZEROS, 1.5)
    values[-1] = last
    return _stored(b"coo", (SIDE, SIDE), row=place, col=place[::-1], data=values)


def _one_block() -> bytes:
    block = _dense("<f4")[None]
    return _stored(b"bsr", block.shape[1:], indptr=np.array([0, 1]), indices=np.array([0]), data=block)


def _many_blocks() -> bytes:
    blocks = BYTES // 2 - 1000
    data = np.zeros((blocks, 1, 1), "|b1")
    return _stored(b"bsr", (1, 256), indptr=np.array([0, blocks]), indices=np.zeros(blocks, "u1"), data=data)


def _diagonals() -> bytes:
    data = _dense("<f4")
    return _stored(b"dia", (SIDE, data.shape[1]), offsets=-np.arange(1024, dtype="<i8"), data=data)


def _empty_diagonals() -> bytes:
    count = BYTES - 1000
    return _stored(b"dia", (SIDE, SIDE), offsets=np.zeros(count, "u1"), data=np.zeros((count, 0), "<f4"))


def _tensors(kind: str, weights: np.ndarray) -> bytes:
    return safetensors({"w": tensor(kind, list(weights.shape), 0, weights.nbytes)}, weights.tobytes())


def _bf16() -> bytes:
    """The upper halves of float32."""
    return _tensors("BF16", (_dense("<f2").astype("<f4").view("<u4") >> 16).astype("<u2"))


def _tensors_by_the_thousand() -> bytes:
    """As many as the longest header can name."""
    count = 53_000
    header = {f"{at:x}": tensor("F32", [1, 1], 4 * at, 4 * at + 4) for at in range(count)}
    return safetensors(header, bytes(4 * count))


def _text(beginning: bytes, line: bytes) -> bytes:
    return beginning + line * ((BYTES - len(beginning)) // len(line))


def _coordinates(banner: bytes, *, last: bytes, shape: tuple[int, int] = (SIDE, SIDE)) -> bytes:
    """As many entries as may be, the last place first, with as many spaces between their numbers as fit."""
    lines = b"".join(b"%d %d 3.5\n" % (place, place) for place in range(NONZEROS, 1, -1))
    spaces = b" " * ((BYTES - len(lines) - 200) // NONZEROS)
    return banner + b"%d %d %d\n" % (*shape, NONZEROS) + lines.replace(b" 3.5", spaces + b" 3.5") + last


def _below_the_diagonal() -> bytes:
    """A symmetric matrix of half as many entries as may be nonzeros, and one more than that."""
    count = NONZEROS // 2
    lines = b"".join(b"%d %d 3.5\n" % (place + 1, place) for place in range(count + 1, 0, -1))
    spaces = b" " * ((BYTES - len(lines) - 200) // count)
    banner = _REAL.replace(b"general", b"symmetric") + b"%d %d %d\n" % (SIDE, SIDE, count + 1)
    return banner + lines.replace(b" 3.5", spaces + b" 3.5")


def _offsets() -> bytes:
    """A pattern of as many rows and entries as may be, with an entry given twice at the end."""
    offsets = b"".join(b"%d " % min(place, NONZEROS) for place in range(SIDE)) + b"%d\n" % NONZEROS
    return b"%d %d %d\n" % (SIDE, SIDE, NONZEROS) + offsets + b"7 " * (NONZEROS - 1) + b"-1"


def _deflated(megabytes: int) -> bytes:
    """Numbers that cannot be compressed, compressed: nearly as many bytes again once they are inflated."""
    numbers = np.random.default_rng(0).bytes(megabytes << 20)
    return npz([("data.npy", npy((len(numbers) // 8,), "<f8", numbers))], zipfile.ZIP_DEFLATED)


REFUSED: Mapping[str, Callable[[], bytes]] = {
    "dense, nothing pruned": lambda: _array(np.ones((1024, MEGABYTES << 8), "<f4")),
    "dense, NaN at the end": lambda: _array(_dense("<f4", count=1)),
    "dense, many nonzeros": lambda: _array(_dense("<f4")),
    "dense, bytes in the other order": lambda: _array(_dense(">f8")),
    "dense, by columns": lambda: _array(_dense("<f2").T, by_columns=True),
    "dense, bytes": lambda: _array(_dense("|i1", last=1, count=2 * NONZEROS)),
    "CSR, as many entries as may be": lambda: _csr(NONZEROS),
    "CSR, in the other byte order": lambda: _csr(NONZEROS, ">f8"),
    "CSR, more": lambda: _csr(15_900_000),
    "CSR, zeros": _explicit_zeros,
    "CSR, indices without values": _indices_without_values,
    "COO, in the wrong order": lambda: _coo(last=np.nan),
    "BSR, one block": _one_block,
    "BSR, as many blocks as fit": _many_blocks,
    "DIA": _diagonals,
    "DIA, diagonals of no length": _empty_diagonals,
    "compressed to no avail": lambda: _deflated(MEGABYTES),
    "compressed, half as large": lambda: _deflated(127),
    "bomb": lambda: bomb(1024),
    "tensor": lambda: _tensors("F32", _dense("<f4")),
    "tensor, BF16": _bf16,
    "tensors by the thousand": _tensors_by_the_thousand,
    "MatrixMarket, more entries": lambda: _text(_REAL + b"99999 99999 4000000\n", b"1 2 3.5\n"),
    "MatrixMarket, in the wrong order": lambda: _coordinates(_REAL, last=b"1 1 nan\n"),
    "MatrixMarket, symmetric": _below_the_diagonal,
    "smtx": _offsets,
    "smtx, more numbers": lambda: _text(b"1000, 99999, 4000000\n", b"0 "),
}

#: What is accepted, after as much work.
SOUND: Mapping[str, Callable[[], bytes]] = {
    "sound, dense": lambda: _array(_dense("<f4", last=2, count=NONZEROS - 1)),
    "sound, COO": lambda: _coo(last=2.5),
    "sound, MatrixMarket": lambda: _coordinates(_REAL, last=b"1 1 3.5\n"),
}
