"""Files that are mapped and read by the piece: as those in memory, and their memory is given back."""

import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save as save_tensors

from lospmm.matrix import mapped as content
from lospmm.matrix import mapped as nonzeros
from lospmm.matrix import npz as npy
from lospmm.matrix import text as matrix_text
from lospmm.matrix.csr import from_dense
from lospmm.matrix.mapped import content_of, give_back
from lospmm.matrix.readers import read_bytes
from tests.fixtures.files import WEIGHTS, saved, smtx


@pytest.fixture
def tiny_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content, "SMALL_BYTES", 0)
        for module in (content, matrix_text, nonzeros, npy):
            patch.setattr(module, "PIECE_BYTES", 16)
        patch.setattr(matrix_text, "_CHUNK_BYTES", 5)
        yield


def _archive(layout, *, compressed):
    return lambda weights: saved(
        scipy.sparse.save_npz, scipy.sparse.coo_array(weights).asformat(layout), compressed=compressed
    )


FORMATS = {
    "npy": lambda weights: saved(np.save, weights),
    "npy, by columns, in the other byte order": lambda weights: saved(np.save, np.asarray(weights, ">f8", order="F")),
    **{f"npz, {layout}": _archive(layout, compressed=False) for layout in ("csr", "csc", "coo", "bsr", "dia")},
    "npz, compressed": _archive("csr", compressed=True),
    "npz, dense": lambda weights: saved(np.savez, layer=weights),
    "npz, dense and compressed": lambda weights: saved(np.savez_compressed, weights),
    "mtx": lambda weights: saved(scipy.io.mmwrite, scipy.sparse.coo_array(weights), precision=9),
    "safetensors": lambda weights: save_tensors({"w": np.ascontiguousarray(weights)}),
}


@pytest.mark.usefixtures("tiny_pieces")
@pytest.mark.parametrize("name", FORMATS)
def test_the_same_matrix_by_the_piece(name):
    @given(WEIGHTS)
    def check(weights):
        with tempfile.TemporaryFile() as file:
            file.write(FORMATS[name](weights))
            assert isinstance(content_of(file), mmap.mmap)
            assert read_bytes(content_of(file), "layer").matrix == from_dense(weights)

    check()


@pytest.mark.usefixtures("tiny_pieces")
@given(st.integers(1, 9).flatmap(lambda side: st.lists(st.integers(-3, 3), min_size=side**2, max_size=side**2)))
def test_triangles_by_the_piece(numbers):
    side = int(len(numbers) ** 0.5)
    lower = np.tril(np.array(numbers, np.float32).reshape(side, side))
    symmetric = lower + np.tril(lower, -1).T
    text = saved(scipy.io.mmwrite, scipy.sparse.coo_array(symmetric), symmetry="symmetric")
    assert b"symmetric" in text
    assert read_bytes(text, "layer.mtx").matrix == from_dense(symmetric)


@pytest.mark.usefixtures("tiny_pieces")
@given(WEIGHTS)
def test_patterns_by_the_piece(weights):
    assert np.array_equal(read_bytes(smtx(weights), "layer").matrix.to_scipy().toarray() != 0, weights != 0)


def test_small_files_are_read():
    with tempfile.TemporaryFile() as file:
        assert content_of(file) == b""
        file.write(b"not yet on disk")
        assert content_of(file) == b"not yet on disk"


def _mapped_bytes():
    """What of this process's memory is files (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile:"))


def test_memory_is_given_back():
    with tempfile.TemporaryFile() as file:
        file.write(bytes(64 << 20))
        mapped = content_of(file)
        before = _mapped_bytes()
        view = np.frombuffer(mapped, np.uint8)
        assert not view.any()
        assert _mapped_bytes() > before + (60 << 20)
        give_back(mapped)
        assert _mapped_bytes() < before + (4 << 20)
        assert not view.any(), "what refers to it stays as it is"


@pytest.mark.parametrize("most", [1, 1 << 20], ids=["on disk", "in memory"])
def test_what_is_small_stays_in_memory(most: int) -> None:
    """A file on disk is a descriptor, of which a form of thousands of matrices would take one each."""
    with tempfile.SpooledTemporaryFile(max_size=most) as file:
        file.write(b"some bytes")
        assert content_of(file) == content_of(file) == b"some bytes"
        assert (file.name is None) == (most > 1)
