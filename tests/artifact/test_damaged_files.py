"""Files damaged at random: the outcome is a matrix or BadMatrix, never another exception and never a warning."""

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save as save_tensors

from lospmm.errors import BadMatrix
from lospmm.matrix.csr import SparseMatrix
from lospmm.matrix.readers import read_bytes
from tests.fixtures.files import saved, smtx

PRUNED = np.array([[0, 1.5, 0], [0, 0, 0], [-2, 0, 3]], dtype=np.float32)
SOUND = {
    "a.npy": saved(np.save, PRUNED),
    "csr.npz": saved(scipy.sparse.save_npz, scipy.sparse.csr_array(PRUNED)),
    "bsr.npz": saved(scipy.sparse.save_npz, scipy.sparse.bsr_array(PRUNED), compressed=False),
    "dia.npz": saved(scipy.sparse.save_npz, scipy.sparse.dia_array(PRUNED), compressed=False),
    "coo.npz": saved(scipy.sparse.save_npz, scipy.sparse.coo_array(PRUNED), compressed=False),
    "a.mtx": saved(scipy.io.mmwrite, scipy.sparse.coo_array(PRUNED)),
    "a.smtx": smtx(PRUNED),
    "a.safetensors": save_tensors({"w": PRUNED}),
}


#: Arrays of any type and shape, and often enough some that could be indices.
ARRAYS = hnp.arrays(
    st.sampled_from([">i2", "i4", "i8", "u8", "f4", "f8", "?", "c8", "S2"]).map(np.dtype),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
) | hnp.arrays(st.sampled_from([np.int32, np.int64]), st.integers(1, 4), elements=st.integers(0, 3))


def assert_read_or_refused(content, name):
    try:
        assert isinstance(read_bytes(content, name).matrix, SparseMatrix)
    except BadMatrix as error:
        assert str(error).startswith(f"{name}: ")
        assert str(error).isprintable()


@pytest.mark.parametrize("name", SOUND)
def test_every_prefix_of_a_file_is_refused(name):
    content = SOUND[name]
    # A text file may lose its last newline or end on a shorter number and be a whole file still.
    whole = len(content.rstrip()) - 1 if name.endswith("mtx") else len(content)
    for length in range(len(content)):
        if length >= whole:
            assert_read_or_refused(content[:length], name)
        else:
            with pytest.raises(BadMatrix):
                read_bytes(content[:length], name)


@pytest.mark.parametrize("name", SOUND)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_damaged_files_are_read_or_refused(name, data):
    content = bytearray(SOUND[name])
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=6)):
        content[at] = data.draw(st.integers(0, 255) | st.sampled_from(b"0-9 ,.e(\n"))
    keep = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    assert_read_or_refused(bytes(content[:keep]), name)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["csr", "csc", "coo", "bsr", "dia"]),
    st.fixed_dictionaries(dict.fromkeys(("indptr", "indices", "row", "col", "offsets", "data"), ARRAYS)),
    st.just(np.array([2, 2])) | ARRAYS,
)
def test_archives_of_any_arrays_are_read_or_refused(layout, arrays, shape):
    assert_read_or_refused(saved(np.savez, format=layout.encode(), shape=shape, **arrays), "a.npz")


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"PK\x03\x04",
        b"\x93NUMPY\x01\x00",
        b"%%MatrixMarket matrix coordinate real general\n",
        b"2, 2, 1\n",
        b"\x02" + bytes(7) + b"{",
    ],
)
@given(st.binary(max_size=200))
def test_noise_is_refused(beginning, noise):
    assert_read_or_refused(beginning + noise, "noise")
