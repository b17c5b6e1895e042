"""Every way a file can be wrong on purpose: refused in one line that says so, in memory that the file accounts for."""

import re
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from safetensors.numpy import save as save_tensors

import lospmm.settings
from lospmm.errors import BadMatrix
from lospmm.matrix.csr import MAX_DIMENSION
from lospmm.matrix.npz import MAX_MEMBERS
from lospmm.matrix.readers import read, read_bytes, read_model
from tests.fixtures.files import csr, npy, npz, safetensors, saved, smtx, tensor

EYE = np.eye(4, dtype=np.float32)
MTX = b"%%MatrixMarket matrix coordinate real general\n"
SYMMETRIC = b"%%MatrixMarket matrix coordinate real symmetric\n"
BOMB = npz([("data.npy", npy((2**24,), values=bytes(2**26)))])
F32 = safetensors({"w": tensor("F32", [1, 2], 0, 8)}, bytes(8))


def encrypted():
    """A sound archive whose directory and members claim to be encrypted."""
    content = bytearray(csr())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = content.find(signature)
        while at >= 0:
            content[at + flags] |= 1
            at = content.find(signature, at + 4)
    return bytes(content)


def understated():
    """The bomb, with 128 bytes declared as its inflated size."""
    content = bytearray(BOMB)
    directory = content.find(b"PK\x01\x02")
    content[directory + 24 : directory + 28] = (128).to_bytes(4, "little")
    return bytes(content)


def layout(name, **arrays):
    return saved(np.savez, format=name.encode(), **arrays)


REFUSED = {
    "empty": ("a.npz", b"", "is empty"),
    "wrong magic": ("a.npy", b"GIF89a, not a matrix", "does not begin as a .npy file does"),
    "shards": ("a.safetensors.index.json", b'{"weight_map": {}}', "lists the shards of a model; name their folder"),
    "no magic": ("a.dat", b"GIF89a, not a matrix", "is none of .npz, .npy, .mtx, .safetensors, .smtx"),
    "suffix": ("a.npz", saved(np.save, EYE), "the name says .npz but the content is .npy; rename"),
    "HDF5": ("a.h5", b"\x89HDF\r\n\x1a\n", "is HDF5, as of Keras"),
    "pytorch": ("a.pt", npz([("archive/data.pkl", b"x")]), "truncated or damaged file of torch.save"),
    # .npy
    "npy version": ("a.npy", b"\x93NUMPY\x09\x00\x10\x00", "has .npy version"),
    "npy cut header": ("a.npy", saved(np.save, EYE)[:40], "truncated or wrong header: 118 bytes promised, 30 left"),
    "npy cut values": ("a.npy", saved(np.save, EYE)[:-1], "truncated: the header promises 64 bytes of values, 63"),
    "npy bytes left": ("a.npy", saved(np.save, EYE) + b"x", "bytes left over"),
    "npy 32 GiB": ("a.npy", npy((2**16, 2**17)), "promises 34359738368 bytes of values, 0 follow"),
    "npy overflow": ("a.npy", npy((2**62, 2**62)), "promises an array of shape (4611686018427387904, 46"),
    "npy hidden zero": ("a.npy", npy((0, 2**62)), "promises an array of shape (0, 4611686018427387904)"),
    "npy endless side": ("a.npy", npy((10**40, 1)), "promises an array of shape (1000"),
    "npy sides": ("a.npy", npy((1,) * 70), "of 70 dimensions"),
    "npy no header": ("a.npy", b"\x93NUMPY\x01\x00\x02\x00{}", "header is not understood: '{}'"),
    "npy negative": ("a.npy", npy((-2, 2)), "header is not understood"),
    "npy pickle": ("a.npy", saved(np.save, np.array([["x", None]], object)), "(a pickle), which are never loaded"),
    "npy records": ("a.npy", saved(np.save, np.zeros(2, "f4,f4")), "records of several fields"),
    "npy complex": ("a.npy", saved(np.save, EYE * 1j), "complex values"),
    "npy text": ("a.npy", saved(np.save, np.array([["x", "y"]])), "<U1 are not real numbers"),
    "npy no characters": ("a.npy", npy((2**39, 2), "|S0"), "holds values of type '|S0'"),
    "npy dates": ("a.npy", saved(np.save, np.zeros((2, 2), "M8[s]")), "type '<M8[s]'; save it as float32"),
    "npy 1-D": ("a.npy", saved(np.save, EYE[0]), "two dimensions, this array has 1"),
    "npy 3-D": ("a.npy", saved(np.save, EYE[None]), "two dimensions, this array has 3"),
    "npy 4-D": ("a.npy", saved(np.save, EYE[None, None]), "this array has 4; reshape weights of a convolution"),
    "npy no rows": ("a.npy", saved(np.save, EYE[:0]), "shape (0, 4)"),
    "npy NaN": ("a.npy", saved(np.save, EYE * np.nan), "row 0, column 0: nan is not a finite"),
    "npy infinity": ("a.npy", saved(np.save, np.array([[1, np.inf]])), "row 0, column 1: inf is not a finite"),
    "npy too large": ("a.npy", saved(np.save, np.array([[0, 1e39]])), "1e+39 is not a finite float32"),
    # .npz
    "npz empty": ("a.npz", npz([]), "has no array 'shape'"),
    "npz of two": ("a.npz", saved(np.savez, a=EYE, b=EYE), "no array 'shape', and not one dense array alone; save a"),
    "npz of a row": ("a.npz", saved(np.savez, w=EYE[0]), "has no array 'shape' (it has: w)"),
    "npy many": ("a.npy", npy((2**20, 2**21)), "none is read of more than 4 dimensions or 2**40 numbers; save"),
    "npz cut": ("a.npz", csr()[:-30], "truncated or damaged archive"),
    "npz cut early": ("a.npz", csr()[:4], "truncated or damaged archive"),
    "npz bomb": ("a.npz", BOMB, f"{len(BOMB)} bytes would inflate to 67108"),
    "npz understated": ("a.npz", understated(), "Bad CRC-32 for file 'data.npy'"),
    "npz members": ("a.npz", npz([(f"{i}.npy", b"") for i in range(MAX_MEMBERS + 1)]), "more than 32 members"),
    "npz encrypted": ("a.npz", encrypted(), "'format.npy' is encrypted"),
    "npz bzip2": ("a.npz", npz([("data.npy", b"x")], zipfile.ZIP_BZIP2), "method 12, not deflate"),
    "npz LZMA": ("a.npz", npz([("data.npy", b"x")], zipfile.ZIP_LZMA), "method 14, not deflate"),
    "npz parent": ("a.npz", npz([("../data.npy", b"")]), "'../data.npy' points outside the archive"),
    "npz backslash": ("a.npz", npz([("..\\data.npy", b"")]), "points outside the archive"),
    "npz absolute": ("a.npz", npz([("/etc/data.npy", b"")]), "'/etc/data.npy' points outside the archive"),
    "npz folder": ("a.npz", npz([("deep/data.npy", b"")]), "'deep/data.npy' is not an array"),
    "npz wrong member": ("a.npz", npz([("data.npy", b"text")]), "member data.npy: does not begin with the .npy magic"),
    "npz pickle": ("a.npz", csr(data=np.array([1, None, 2], object)), "member data.npy: holds Python objects"),
    "npz format": ("a.npz", csr(format=b"lil"), "sparse format 'lil' is none of csr, csc, coo, bsr, dia"),
    "npz format type": ("a.npz", csr(format=np.zeros(2)), "not the name of a format"),
    "npz no data": ("a.npz", csr(data=None), "has no array 'data' (it has: format, shape, indptr, indices)"),
    "npz 2-D data": ("a.npz", csr(data=EYE), "array 'data' has 2 dimensions, not 1"),
    "npz text data": ("a.npz", csr(data=["x", "y", "z"]), "<U1 are not real numbers"),
    "npz shape 3": ("a.npz", csr(shape=[2, 3, 1]), "the shape has 3 sides"),
    "npz shape 1": ("a.npz", csr(shape=[2]), "shape (2,): a matrix has two sides"),
    "npz shape 0": ("a.npz", csr(shape=[2, 0]), "shape (2, 0)"),
    "npz shape -1": ("a.npz", csr(shape=[2, -1]), "shape (2, -1)"),
    "npz shape huge": ("a.npz", csr(shape=[2, 10**12]), f"each from 1 to {MAX_DIMENSION}"),
    "npz shape real": (
        "a.npz",
        csr(shape=[2.0, 3.0]),
        "the shape has 2 sides of type float64, a matrix has",
    ),
    "npz shape smaller": ("a.npz", csr(shape=[1, 3]), "1 rows (or columns) need 2 offsets"),
    "npz indptr falls": ("a.npz", csr(indptr=[0, 3, 2]), "fall after number 1"),
    "npz indptr short": ("a.npz", csr(indptr=[0, 2, 2]), "run from 0 to 2, not from 0 to 3"),
    "npz indptr real": ("a.npz", csr(indptr=[0.0, 2, 3]), "not float64"),
    "npz index": ("a.npz", csr(indices=[0, 3, 1]), "column index number 1 is 3, outside 0 to 2"),
    "npz index -1": ("a.npz", csr(indices=[0, -1, 1]), "column index number 1 is -1"),
    "npz indices real": ("a.npz", csr(indices=[0.0, 2, 1]), "not float64"),
    "npz lengths": ("a.npz", csr(data=[1.0]), "do not match"),
    "npz no values": (
        "a.npz",
        csr(indptr=[0, 0, 10**6], indices=np.zeros(10**6, "u1"), data=[1.0]),
        "1000000 indices and 1 values do not match",
    ),
    "csc no values": (
        "a.npz",
        csr(format=b"csc", indptr=[0, 0, 0, 10**6], indices=np.zeros(10**6, "u1"), data=[1.0]),
        "1000000 indices and 1 values do not match",
    ),
    "npz twice": ("a.npz", csr(indices=[2, 2, 1]), "row 0, column 2 is given twice"),
    "npz NaN": ("a.npz", csr(data=[1, np.nan, 2]), "row 0, column 2: nan"),
    "coo lengths": ("a.npz", layout("coo", shape=[2, 2], row=[0], col=[0, 1], data=[1.0]), "do not match"),
    "coo coords": ("a.npz", layout("coo", shape=[2, 2], coords=[[0]], data=[1.0]), "'coords' has 1 rows"),
    "bsr tiles": (
        "a.npz",
        layout("bsr", shape=[4, 4], indptr=[0, 1], indices=[0], data=np.ones((1, 3, 2))),
        "do not tile shape (4, 4)",
    ),
    "bsr empty block": (
        "a.npz",
        layout("bsr", shape=[4, 4], indptr=[0, 1], indices=[0], data=np.ones((1, 0, 2))),
        "do not tile shape (4, 4)",
    ),
    "bsr wraps": (
        "a.npz",
        layout("bsr", shape=[2, 4], indptr=[0, 1], indices=[2**63], data=np.ones((1, 2, 2))),
        "block column number 0 is 9223372036854775808",
    ),
    "dia offset": (
        "a.npz",
        layout("dia", shape=[2, 2], offsets=[-(2**63)], data=np.ones((1, 2))),
        "diagonal number 0 is -9223372036854775808",
    ),
    "dia twice": (
        "a.npz",
        layout("dia", shape=[2, 2], offsets=[0, 0], data=np.ones((2, 2))),
        "row 0, column 0 is given twice",
    ),
    "dia many": (
        "a.npz",
        layout("dia", shape=[2, 2], offsets=[0] * 4, data=np.ones((4, 2))),
        "4 diagonals, more than the 3 of a matrix of shape (2, 2)",
    ),
    "dia no length": (
        "a.npz",
        layout("dia", shape=[2, 2], offsets=np.zeros(10**6, "u1"), data=np.ones((10**6, 0))),
        "1000000 diagonals",
    ),
    "dia count": ("a.npz", layout("dia", shape=[2, 2], offsets=[0], data=np.ones((2, 2))), "1 offsets for 2"),
    # .mtx
    "mtx banner": ("a.mtx", b"%%MatrixMarket matrix\n", "is not '%%MatrixMarket matrix LAYOUT FIELD SYMMETRY'"),
    "mtx complex": ("a.mtx", MTX.replace(b"real", b"complex"), "field 'complex' is not supported"),
    "mtx hermitian": ("a.mtx", MTX.replace(b"general", b"hermitian"), "symmetry 'hermitian' is not supported"),
    "mtx array": ("a.mtx", saved(scipy.io.mmwrite, EYE), "layout 'array' is not supported, only coordinate; convert"),
    "mtx no sizes": ("a.mtx", MTX + b"% only\n", "truncated: no line of sizes"),
    "mtx comments": ("a.mtx", MTX + b"%\n" * 2**20, "no line of sizes in the first 10"),
    "mtx long line": ("a.mtx", MTX + b"%" * 10_000, "is longer than 4096 bytes"),
    "mtx sizes": ("a.mtx", MTX + b"2 2\n", "the line of sizes, '2 2', does not give rows, columns, entries"),
    "mtx negative": ("a.mtx", MTX + b"2 -2 1\n", "the line of sizes"),
    "mtx rows": ("a.mtx", MTX + b"1000000000000 2 1\n1 1 1\n", "shape (1000000000000, 2)"),
    "mtx entries": ("a.mtx", MTX + b"2 2 1000000000000\n", "1000000000000 nonzeros, more than"),
    "mtx no entries": ("a.mtx", MTX + b"2000 2000 1000000\n1 1 1\n", "promises 3000000 numbers, 6 bytes follow"),
    "mtx cut": ("a.mtx", MTX + b"2 2 2\n1 1 1.00\n", "truncated"),
    "mtx one short": ("a.mtx", MTX + b"2 2 2\n1 1 1.0\n2 2 \n", "promises 6 numbers, 5 follow"),
    "mtx surplus": ("a.mtx", MTX + b"2 2 1\n1 1 1\n2 2 2\n", "promises 3 numbers, more follow"),
    "mtx word": ("a.mtx", MTX + b"2 2 1\n1 one 1\n", "could not convert string to float: b'one'"),
    "mtx fraction further on": (
        "a.mtx",
        MTX + b"2 2 2\n1 1 1.5\n2 1.5 1\n",
        "number 5 after the header, 1.5, is not a whole number",
    ),
    "mtx fraction": ("a.mtx", MTX + b"2 2 1\n1.5 1 1\n", "1.5, is not a whole number"),
    "mtx index NaN": ("a.mtx", MTX + b"2 2 1\nnan 1 1\n", "nan, is not a whole number"),
    "mtx index huge": ("a.mtx", MTX + b"2 2 1\n1e300 1 1\n", "1e+300, is not a whole number"),
    "mtx zero-based": ("a.mtx", MTX + b"2 2 1\n0 1 1\n", "row index number 0 is 0, outside 1 to 2"),
    "mtx outside": ("a.mtx", MTX + b"2 2 1\n1 3 1\n", "column index number 0 is 3, outside 1 to 2"),
    "mtx NaN": ("a.mtx", MTX + b"2 2 1\n1 1 nan\n", "row 0, column 0: nan"),
    "mtx too large": ("a.mtx", MTX + b"2 2 1\n1 1 1e999\n", "row 0, column 0: inf"),
    "mtx twice": ("a.mtx", SYMMETRIC + b"2 2 2\n2 1 1\n1 2 1\n", "is given twice"),
    "mtx not square": ("a.mtx", SYMMETRIC + b"2 3 1\n2 1 1\n", "is square, not 2 x 3"),
    "mtx endless number": ("a.mtx", MTX + b"2 2 1\n1 1 1" + b"0" * 2**18, "a number is longer than 4096 bytes"),
    # .smtx
    "smtx header": ("a.smtx", b"2, 2, 1 0\n0 1 1\n0\n", "'2 2 1 0', does not give rows, columns, nonzeros"),
    "smtx negative": ("a.smtx", b"2, -2, 1\n0 1 1\n0\n", "'2 -2 1', does not give"),
    "smtx rows": ("a.smtx", b"1000000000000, 2, 1\n0 1\n0\n", "shape (1000000000000, 2)"),
    "smtx nonzeros": ("a.smtx", b"2, 2, 1000000000000\n0 1\n0\n", "1000000000000 nonzeros, more than"),
    "smtx cut": ("a.smtx", smtx(EYE)[:-3], "promises 9 numbers, 15 bytes follow"),
    "smtx one short": ("a.smtx", b"1, 20, 2\n0 2\n10\n\n", "promises 4 numbers, 3 follow"),
    "smtx surplus": ("a.smtx", smtx(EYE) + b"1\n", "promises 9 numbers, more follow"),
    "smtx word": ("a.smtx", b"1, 1, 1\n0 1\nzero\n", "could not convert string to float: b'zero'"),
    "smtx no columns": ("a.smtx", b"1, 0, 0\n0 0\n", "shape (1, 0)"),
    "smtx index": ("a.smtx", b"1, 2, 1\n0 1\n2\n", "column index number 0 is 2, outside 0 to 1"),
    "smtx twice": ("a.smtx", b"1, 2, 2\n0 2\n1 1\n", "row 0, column 1 is given twice"),
    "smtx falls": ("a.smtx", b"2, 2, 1\n0 1 0\n0\n", "fall after"),
    # .safetensors
    "tensor header short": ("a.safetensors", F32[:9], "a header of 64 bytes is promised, 1 follow"),
    "tensor header long": ("a.safetensors", b"\xff" * 8 + F32[8:], "18446744073709551615 bytes is promised"),
    "tensor cut": ("a.safetensors", F32[:-1], "truncated or damaged safetensors"),
    "tensor surplus": ("a.safetensors", F32 + b"x", "truncated or damaged safetensors"),
    "tensor JSON": ("a.safetensors", safetensors(b'{"w":' * 10_000), "recursion limit exceeded"),
    "tensor type": ("a.safetensors", safetensors({"w": tensor("X\n9", [1], 0, 4)}, bytes(4)), "unknown variant `X 9`"),
    "tensor shape": ("a.safetensors", safetensors({"w": tensor("F32", [2**62, 4], 0, 8)}, bytes(8)), "overflow"),
    "tensor overlap": (
        "a.safetensors",
        safetensors({"v": tensor("F32", [1, 2], 0, 8), "w": tensor("F32", [1, 2], 4, 12)}, bytes(12)),
        "invalid offset for tensor `w`",
    ),
    "tensor outside": ("a.safetensors", safetensors({"w": tensor("F32", [1, 2], 8, 16)}, bytes(8)), "damaged"),
    "tensor no rows": ("a.safetensors", safetensors({"w": tensor("F32", [0, 2**62], 0, 0)}), "shape (0, 46116"),
    "tensor 1-D": ("a.safetensors", save_tensors({"b": EYE[0]}), "holds no weight: a weight is F16, BF16, F32, F64"),
    "tensor integers": ("a.safetensors", save_tensors({"w": EYE.astype(np.int8)}), "holds no weight: a weight is"),
    "tensor several": (
        "a.safetensors",
        save_tensors({"v": EYE, "w": EYE}),
        "holds 2 weights; choose one by --tensor, or tensor=: v, w",
    ),
    "tensor many": (
        "a.safetensors",
        save_tensors({f"layer{i:02}": EYE for i in range(25)}),
        "layer19 and 5 more",
    ),
    "tensor parent": ("a.safetensors", save_tensors({"../w": EYE}), "tensor name '../w' could point outside"),
    "tensor absolute": ("a.safetensors", save_tensors({"/w": EYE}), "tensor name '/w' could point outside"),
    "tensor control": (
        "a.safetensors",
        save_tensors({"w\n": EYE}),
        r"tensor name 'w\n' holds a character that cannot be printed",
    ),
    "tensor NaN": ("a.safetensors", save_tensors({"w": EYE * np.nan}), "row 0, column 0: nan"),
}


@pytest.mark.parametrize(("name", "content", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(name, content, words):
    with pytest.raises(BadMatrix) as caught:
        read_bytes(content, name)
    message = str(caught.value)
    assert words in message
    assert message.startswith(f"{name}: ")
    assert message.isprintable()
    assert len(message) < 500


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.npz", csr(data=[0.0, 0, 0]), "3 entries, zeros among them, more than the 2 that LOSPMM_MAX_NONZEROS"),
        ("a.npz", csr(), "3 nonzeros, more than the 2"),
        (
            "a.npz",
            layout("bsr", shape=[3, 3], indptr=[0, 1, 2, 3], indices=[0, 1, 2], data=np.zeros((3, 1, 1))),
            "3 nonzeros, more than the 2",
        ),
        ("a.npy", saved(np.save, EYE), "4 nonzeros, more than the 2"),
        ("a.mtx", saved(scipy.io.mmwrite, scipy.sparse.coo_array(EYE)), "nonzeros, more than the 2"),
        ("a.mtx", SYMMETRIC + b"2 2 2\n2 1 1\n2 2 1\n", "3 nonzeros, more than the 2"),
    ],
    ids=["zeros", "csr", "blocks", "dense", "text", "triangle"],
)
@pytest.mark.usefixtures("own_settings")
def test_more_entries_than_may_be(monkeypatch, name, content, words):
    monkeypatch.setenv("LOSPMM_MAX_NONZEROS", "2")
    lospmm.settings.settings.cache_clear()
    with pytest.raises(BadMatrix) as caught:
        read_bytes(content, name)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "case",
    ["npy 32 GiB", "npz bomb", "npz understated", "npz no values", "dia no length", "mtx no entries"],
)
def test_a_refusal_takes_memory_in_proportion_to_the_file(case):
    name, content, _ = REFUSED[case]
    tracemalloc.start()
    try:
        with pytest.raises(BadMatrix):
            read_bytes(content, name)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 256_000 + 4 * len(content)


@pytest.mark.parametrize(
    ("tensor_name", "words"),
    [
        ("missing", "has no tensor 'missing'; its weights are: w"),
        ("b", "tensor 'b' is F32 of shape [4]; a weight is F16, BF16, F32, F64, 2-D to 4-D: w"),
        ("i", "tensor 'i' is I32 of shape [4, 4]"),
    ],
)
def test_refused_tensor(tensor_name, words):
    content = save_tensors({"w": EYE, "b": EYE[0], "i": EYE.astype(np.int32)})
    with pytest.raises(BadMatrix) as caught:
        read_bytes(content, "a.safetensors", tensor=tensor_name)
    assert words in str(caught.value)


def test_tensor_is_only_for_safetensors():
    with pytest.raises(BadMatrix, match=r"^a.npy: tensor chooses from a .safetensors, .onnx or .pt file, this is .npy"):
        read_bytes(saved(np.save, EYE), "a.npy", tensor="w")


def test_seed_is_not_negative():
    with pytest.raises(BadMatrix, match=r"^a.smtx: seed -1 is negative"):
        read_bytes(smtx(EYE), "a.smtx", seed=-1)


def test_names_are_made_printable():
    with pytest.raises(BadMatrix) as caught:
        read_bytes(b"", "x" * 10_000 + "/a\n\x1b[31m.npz")
    assert str(caught.value) == r"'a\n\x1b[31m.npz': is empty (0 bytes)"


@pytest.fixture
def limits(monkeypatch):
    """Settings of 10 nonzeros and 4096 bytes."""
    monkeypatch.setenv("LOSPMM_MAX_NONZEROS", "10")
    monkeypatch.setenv("LOSPMM_MAX_UPLOAD_BYTES", "4096")
    lospmm.settings.settings.cache_clear()
    yield
    lospmm.settings.settings.cache_clear()


@pytest.mark.usefixtures("limits")
def test_limit_of_nonzeros(tmp_path):
    eleven = np.eye(11, dtype=np.float32)
    files = {
        "a.npy": saved(np.save, eleven),
        "a.npz": saved(scipy.sparse.save_npz, scipy.sparse.csr_array(eleven)),
        "a.mtx": saved(scipy.io.mmwrite, scipy.sparse.coo_array(eleven)),
        "a.smtx": smtx(eleven),
        "a.safetensors": save_tensors({"w": eleven}),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        says = f"^{re.escape(str(tmp_path / name))}: 11 nonzeros, more than the 10 that LOSPMM_MAX_NONZEROS allows"
        with pytest.raises(BadMatrix, match=says):
            read(tmp_path / name)


@pytest.mark.usefixtures("limits")
def test_limit_of_bytes(tmp_path):
    path = tmp_path / "a.npy"
    path.write_bytes(saved(np.save, np.zeros((32, 32), np.float32)))
    says = f"^{re.escape(str(path))}: is larger than the 4096 bytes that LOSPMM_MAX_UPLOAD_BYTES allows"
    with pytest.raises(BadMatrix, match=says):
        read(path)


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("rows", [32, 1024])  # the second is mapped
def test_a_local_model_has_any_size(tmp_path, rows):
    path = tmp_path / "a.safetensors"
    path.write_bytes(save_tensors({"w": np.eye(rows, 1024, 1020, dtype=np.float32)}))
    assert read(path).matrix.nnz == 4
    assert [name for name, file in read_model(path.read_bytes(), path.name) if file.matrix.nnz == 4] == ["w"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.npz", "there is no such file"),
        (".", "is a directory; name a file"),
        ("x" * 300, "cannot be read: File name too long"),
        ("null\0.npz", "there is no such file"),
    ],
)
def test_refused_path(tmp_path, name, words):
    with pytest.raises(BadMatrix) as caught:
        read(tmp_path / name)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_device_is_not_read():
    with pytest.raises(BadMatrix, match="/dev/zero: is a device or pipe"):
        read(Path("/dev/zero"))
