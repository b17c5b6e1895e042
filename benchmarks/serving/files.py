"""Files that are no matrix, each for a reason: a strategy of Hypothesis for every way to lie.

Every one of them is wrong by the way it is made: a reader that takes one has a fault.
"""

import bz2
import gzip
import io
import zipfile
from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import scipy.io
import scipy.sparse
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.fixtures.files import csr, npy, npz, safetensors, saved, smtx, tensor

Files = SearchStrategy[bytes]

_SIDE = st.integers(1, 40)
_HUGE = st.sampled_from([2**15, 2**20, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63, 2**64, 10**17])
_NOT_FINITE = st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e39, -1e300])
_TEXT = st.text(st.characters(codec="latin-1", exclude_characters="\n\r"), min_size=1, max_size=40)
_WORD = st.sampled_from(["", "x", "1e", "0x10", "--1", "nan1", "1,5", "1 2 3 4", "\x00", "🙂", "1" * 5000, "None"])


def _weights(side: int) -> np.ndarray:
    generator = np.random.default_rng(side)
    weights = np.where(generator.random((side, side + 1)) < 0.4, generator.standard_normal((side, side + 1)), 0)
    weights[0, 0] = 1.5
    return weights.astype(np.float32)


def _mtx(side: int) -> bytes:
    stream = io.BytesIO()
    scipy.io.mmwrite(stream, scipy.sparse.coo_array(_weights(side)))
    return stream.getvalue()


def _tensors(side: int) -> bytes:
    weights = _weights(side)
    return safetensors({"w": tensor("F32", list(weights.shape), 0, weights.nbytes)}, weights.tobytes())


#: Sound files of each format.
SOUND: Mapping[str, Callable[[int], bytes]] = {
    "npy": lambda side: saved(np.save, _weights(side)),
    "npz": lambda side: saved(scipy.sparse.save_npz, scipy.sparse.csr_array(_weights(side))),
    "mtx": _mtx,
    "smtx": lambda side: smtx(_weights(side)),
    "safetensors": _tensors,
}


@st.composite
def cut(draw: st.DrawFn) -> bytes:
    """A sound file without its end: text between two lines, since a shorter last number would be one too."""
    kind = draw(st.sampled_from(sorted(SOUND)))
    content = SOUND[kind](draw(_SIDE))
    if kind.endswith("mtx"):
        lines = content.splitlines(keepends=True)
        return b"".join(lines[: draw(st.integers(0, len(lines) - 1))])
    return content[: draw(st.integers(0, len(content) - 1))]


@st.composite
def bytes_left_over(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(["npy", "safetensors"]))
    return SOUND[kind](draw(_SIDE)) + draw(st.binary(min_size=1, max_size=100))


@st.composite
def lying_shapes(draw: st.DrawFn) -> bytes:
    rows, columns, values = draw(_SIDE), draw(_SIDE), draw(st.binary(max_size=64))
    short = rows * columns * 4 != len(values)
    return npy((rows if short else rows + 1, columns), values=values)


_huge_shapes = st.builds(lambda first, second, values: npy((first, second), values=values), _HUGE, _HUGE, st.binary())
_odd_shapes = st.sampled_from([(), (4,), (2, 2, 1), (1, 1, 2, 2, 1), (-1, 4), (4, -1), (0, 0), (2.0, 2), ("4",), "()"])
_odd_types = st.sampled_from(["|O", "<U8", "|V4", "<c8", "<M8[s]", "(2,)<f4", "__import__('os')", "<f16", "", "x" * 99])


@st.composite
def odd_headers(draw: st.DrawFn) -> bytes:
    """A header that is no dictionary, a wrong length, or an unknown version."""
    text = draw(_TEXT).encode("latin-1")
    length = draw(st.one_of(st.just(len(text)), st.integers(0, 2**16 - 1)))
    version = draw(st.sampled_from([b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x09", b"\x00\x00"]))
    return b"\x93NUMPY" + version + length.to_bytes(2, "little") + text


@cache
def bomb(megabytes: int) -> bytes:
    """An array of zeros that inflates a thousandfold, with a header that is right."""
    return npz([("arr_0.npy", npy((1024, megabytes * 256), values=bytes(megabytes << 20)))])


@cache
def nested(depth: int) -> bytes:
    """Archives in archives, the innermost a bomb."""
    return bomb(4) if depth == 0 else npz([("data.npy", nested(depth - 1)), ("format.npy", nested(depth - 1))])


_OUTSIDE = ("../data.npy", "/etc/passwd", "..\\data.npy", "/data.npy", "C:\\data.npy", "a/../../data.npy", "data/x.npy")


@st.composite
def names_outside(draw: st.DrawFn) -> bytes:
    """A sound matrix with a member that would be written outside the folder it is unpacked to."""
    with zipfile.ZipFile(io.BytesIO(csr())) as opened:
        members = [(name, opened.read(name)) for name in opened.namelist()]
    return npz([*members, (draw(st.sampled_from(_OUTSIDE)), draw(st.binary(max_size=20)))])


@st.composite
def odd_archives(draw: st.DrawFn) -> bytes:
    """Members twice, too many, compressed as nobody does, encrypted, or with a checksum that is not theirs."""
    how = draw(st.sampled_from(["twice", "many", "lzma", "bzip2", "encrypted", "checksum"]))
    number = draw(st.integers(0, 10**6))
    if how == "many":
        return npz([(f"x{number}-{index}.npy", b"") for index in range(33 + number % 100)])
    if how in ("lzma", "bzip2"):
        method = zipfile.ZIP_LZMA if how == "lzma" else zipfile.ZIP_BZIP2
        return npz([("data.npy", npy((1, 1), values=number.to_bytes(4, "little")))], method)
    if how == "twice":
        members = [(name, npy((1,), values=number.to_bytes(4, "little"))) for name in ("data.npy", "dat2.npy")]
        return npz(members).replace(b"dat2.npy", b"data.npy")
    content = bytearray(csr(data=[1.0, 2.0, float(number)]))
    directory = content.rindex(b"PK\x01\x02")
    if how == "encrypted":
        content[directory + 8] |= 1
    else:
        content[directory + 16] ^= 1 + number % 255
    return bytes(content)


_csr_changes = st.one_of(
    st.builds(lambda value: {"data": [1.0, value, 3.0]}, _NOT_FINITE),
    st.builds(lambda index: {"indices": [0, index, 1]}, st.one_of(st.integers(3, 2**62), st.integers(-(2**62), -1))),
    st.builds(lambda offset: {"indptr": [0, offset, 3]}, st.one_of(st.integers(4, 2**62), st.integers(-(2**62), -1))),
    st.builds(lambda first: {"indptr": [first, 2, 3]}, st.integers(1, 2)),
    st.builds(lambda last: {"indptr": [0, 2, last]}, st.one_of(st.integers(4, 99), st.integers(0, 1))),
    st.builds(lambda rows, columns: {"shape": [rows, columns]}, st.integers(2**32, 2**62), st.integers(3, 2**62)),
    st.builds(lambda columns: {"shape": [2, columns]}, st.integers(-(2**62), 0)),
    st.builds(lambda name: {name: None}, st.sampled_from(["shape", "indptr", "indices", "data"])),
    st.builds(lambda sides: {"shape": [2] * sides}, st.integers(3, 30)),
    st.builds(lambda name: {"format": name}, st.sampled_from([b"csx", b"", b"lil", b"../csr", b"x" * 200])),
    st.builds(lambda count: {"data": [1.0] * count}, st.integers(4, 99)),
    st.just({"indices": [0, 0, 1]}),  # an entry twice
    st.just({"indices": [0.5, 2.0, 1.0]}),
)


@st.composite
def lying_texts(draw: st.DrawFn) -> bytes:
    """MatrixMarket whose counts, indices or numbers are wrong."""
    side = draw(_SIDE)
    entry = draw(
        st.one_of(
            st.builds(lambda row: f"{row} 1 1.5", st.one_of(st.integers(-(2**62), 0), st.integers(side + 1, 2**62))),
            st.builds(lambda column: f"1 {column} 1.5", st.integers(side + 1, 2**62)),
            st.builds(lambda value: f"1 1 {value}", _NOT_FINITE),
            st.builds(lambda word: f"1 {word} 1.5", _WORD),
            st.just("1 1 1.5\n1 1 2.5\n1 1 3.5"),
        )
    )
    return f"%%MatrixMarket matrix coordinate real general\n{side} {side} 1\n{entry}\n".encode()


@st.composite
def lying_banners(draw: st.DrawFn) -> bytes:
    counts = draw(st.one_of(st.builds(lambda side: f"{side} {side} 4", st.integers(2**32, 2**70)), _WORD))
    kind = draw(st.sampled_from(["coordinate real", "array real", "coordinate complex", "tensor real", "", "x" * 5000]))
    return f"%%MatrixMarket matrix {kind} general\n{counts}\n".encode()


@st.composite
def lying_patterns(draw: st.DrawFn) -> bytes:
    """An ``.smtx``: rows, columns and nonzeros; offsets; columns."""
    header = draw(
        st.sampled_from(["2, 3, 3", "2, 3, 999999999", "2, 3, 4", "99999999999, 3, 3", "-2, 3, 3", "2, 0, 3"])
    )
    offsets = draw(st.sampled_from(["0 2 9", "0 3 2", "1 2 3", "0 -1 3", "0 1.5 3", "0 2", "x 2 3", "0 2 3 3"]))
    return f"{header}\n{offsets}\n0 2 {draw(st.integers(-9, 99))}\n".encode()


_tensor_changes = st.one_of(
    st.builds(lambda end: tensor("F32", [2, 2], 0, end), st.one_of(st.integers(0, 15), st.integers(17, 2**62))),
    st.builds(lambda start: tensor("F32", [2, 2], start, 16), st.integers(1, 15)),
    st.builds(lambda first, second: tensor("F32", [first, second], 0, 16), _HUGE, _HUGE),
    st.builds(lambda kind: tensor(kind, [2, 2], 0, 16), st.sampled_from(["I32", "BOOL", "F99", "", "U8", "C64"])),
    st.builds(lambda sides: tensor("F32", [4] + [1] * sides, 0, 16), st.sampled_from([0, 2, 4, 9, 200])),
    st.builds(lambda side: tensor("F32", [side, 2], 0, 16), st.integers(-9, -1)),
)


@st.composite
def lying_tensors(draw: st.DrawFn) -> bytes:
    how = draw(st.integers(0, 4))
    if how == 0:
        return draw(st.one_of(st.integers(4097, 2**63), st.integers(0, 1))).to_bytes(8, "little") + b'{"w":{}}'
    if how == 1:
        return safetensors(b'{"w":' * draw(st.integers(1, 3000)))
    if how == 2:
        values = np.array([1, draw(_NOT_FINITE), 2, 3], np.float64)
        return safetensors({"w": tensor("F64", [2, 2], 0, 32)}, values.tobytes()[:24] + b"\xff" * 8)
    if how == 3:
        name = draw(st.sampled_from(["../w", "/w", "a/../../w", "..\\w", "w\x00", "w\n"]))
        return safetensors({name: tensor("F32", [2, 2], 0, 16)}, np.ones(4, np.float32).tobytes())
    return safetensors({"w": draw(_tensor_changes)}, np.ones(4, np.float32).tobytes())


_MAGICS = (
    b"GIF89a", b"\x89PNG\r\n\x1a\n", b"\x7fELF", b"%PDF-1.7", b"\x80\x04\x95", b"\xff\xd8\xff", b"MZ", b"#!/bin/sh\n",
    b"<?xml", b"{}",
)  # fmt: skip


@st.composite
def wrong_magic(draw: st.DrawFn) -> bytes:
    return draw(st.sampled_from(_MAGICS)) + draw(st.binary(max_size=300))


@st.composite
def packed(draw: st.DrawFn) -> bytes:
    """A sound file inside gzip or bzip2, in which nobody looks."""
    pack = draw(st.sampled_from([lambda content: gzip.compress(content, mtime=0), bz2.compress]))
    return bytes(pack(SOUND[draw(st.sampled_from(sorted(SOUND)))](draw(_SIDE))))


FAMILIES: Mapping[str, Files] = {
    "cut": cut(),
    "bytes left over": bytes_left_over(),
    "shapes that lie": lying_shapes(),
    "huge shapes": _huge_shapes,
    "odd shapes": _odd_shapes.map(lambda shape: npy(shape, values=bytes(16))),
    "odd types": _odd_types.map(lambda kind: npy((2, 2), descr=kind, values=bytes(16))),
    "odd headers": odd_headers(),
    "bombs": st.sampled_from([4, 16, 64]).map(bomb),
    "nested archives": st.integers(1, 6).map(nested),
    "names outside": names_outside(),
    "odd archives": odd_archives(),
    "arrays that lie": _csr_changes.map(lambda change: csr(**change)),
    "MatrixMarket that lies": lying_texts(),
    "banners that lie": lying_banners(),
    "patterns that lie": lying_patterns(),
    "tensors that lie": lying_tensors(),
    "other formats": wrong_magic(),
    "packed": packed(),
}
