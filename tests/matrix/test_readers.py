"""Every format read back as the matrix that was written, however it was written."""

import csv

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save as save_tensors

from lospmm.errors import BadMatrix
from lospmm.matrix.csr import from_dense
from lospmm.matrix.readers import read, read_bytes, read_model, tensors_of_model
from tests.fixtures.files import WEIGHTS, saved, smtx
from tests.fixtures.real_layers import REAL_LAYERS, needs_real_layers


@given(WEIGHTS, st.sampled_from(["csr", "csc", "coo", "bsr", "dia"]), st.booleans(), st.booleans())
def test_npz_round_trip(weights, layout, compressed, as_array):
    container = scipy.sparse.coo_array if as_array else scipy.sparse.coo_matrix
    content = saved(scipy.sparse.save_npz, container(weights).asformat(layout), compressed=compressed)
    file = read_bytes(content, "layer.npz")
    assert file.matrix == from_dense(weights)
    assert (file.values, file.name) == ("stored", "layer.npz")


@given(WEIGHTS)
def test_npz_of_bare_arrays(weights):
    csr = scipy.sparse.csr_array(weights)
    arrays = {"shape": csr.shape, "indptr": csr.indptr, "indices": csr.indices, "data": csr.data}
    assert read_bytes(saved(np.savez, **arrays), "layer.npz").matrix == from_dense(weights)


def test_npz_of_blocks():
    weights = np.kron(np.eye(3, dtype=np.float32)[::-1], np.arange(6, dtype=np.float32).reshape(2, 3))
    blocks = scipy.sparse.bsr_array(weights, blocksize=(2, 3))
    assert read_bytes(saved(scipy.sparse.save_npz, blocks), "layer.npz").matrix == from_dense(weights)


def test_npz_of_coordinates_in_one_array():
    arrays = {"format": b"coo", "shape": (2, 3), "coords": [[1, 0], [2, 0]], "data": [5.0, 4.0]}
    assert read_bytes(saved(np.savez, **arrays), "layer.npz").matrix == from_dense(np.array([[4.0, 0, 0], [0, 0, 5]]))


@given(WEIGHTS, st.sampled_from(["<f4", ">f4", "<f8", ">f8"]), st.sampled_from("CF"))
def test_npy_round_trip(weights, kind, order):
    content = saved(np.save, np.asarray(weights, dtype=kind, order=order))
    assert read_bytes(content, "layer.npy").matrix == from_dense(weights)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("kind", ["<f2", "|b1", "|i1", ">i2", "<u4", "<i8"])
def test_npy_of_every_version_and_type(version, kind):
    weights = np.array([[0, 1, 0], [1, 1, 0]]).astype(kind)
    content = saved(np.lib.format.write_array, weights, version=version)
    assert read_bytes(content, "layer.npy").matrix == from_dense(weights)


@given(WEIGHTS)
def test_mtx_coordinate_round_trip(weights):
    content = saved(
        scipy.io.mmwrite, scipy.sparse.coo_array(weights), comment="two\nlines", precision=9, symmetry="general"
    )
    file = read_bytes(content, "layer.mtx")
    assert (file.matrix, file.values) == (from_dense(weights), "stored")


def test_mtx_symmetric_coordinates():
    content = b"%%MatrixMarket matrix coordinate integer symmetric\n\n% why\n3 3 3\n1 1 4\n2 1 -5\n3 2 6\n"
    expected = np.array([[4, -5, 0], [-5, 0, 6], [0, 6, 0]])
    assert read_bytes(content, "layer.mtx").matrix == from_dense(expected)


def test_mtx_longer_than_a_chunk():
    weights = np.arange(1, 30_001, dtype=np.float32).reshape(100, 300) / 7
    content = saved(scipy.io.mmwrite, scipy.sparse.coo_array(weights), precision=9)
    assert len(content) > 4 << 16
    assert read_bytes(content, "layer.mtx").matrix == from_dense(weights)


@given(WEIGHTS, st.sampled_from([", ", " ", ","]), st.integers(0, 2**64))
def test_smtx_round_trip(weights, separator, seed):
    file = read_bytes(smtx(weights, separator), "layer.smtx", seed=seed)
    assert file.values == "drawn"
    assert np.array_equal(file.matrix.to_scipy().toarray() != 0, weights != 0)
    assert file.matrix == read_bytes(smtx(weights), "other.smtx", seed=seed).matrix


def test_a_pattern_and_seed_give_the_same_values_in_every_format():
    weights = np.tri(40, 30, dtype=np.float32)
    drawn = read_bytes(smtx(weights), "layer.smtx", seed=7).matrix
    pattern = saved(scipy.io.mmwrite, scipy.sparse.coo_array(weights), field="pattern")
    file = read_bytes(pattern, "layer.mtx", seed=7)
    assert (file.matrix, file.values) == (drawn, "drawn")
    assert drawn != read_bytes(smtx(weights), "layer.smtx", seed=8).matrix
    expected = np.random.Generator(np.random.PCG64(7)).standard_normal(drawn.nnz).astype(np.float32)
    assert np.array_equal(drawn.data, expected)


def test_drawn_values_are_never_zero(monkeypatch):
    class Zeros:
        def standard_normal(self, count):
            return np.zeros(count)

    monkeypatch.setattr(np.random, "default_rng", lambda _seed: Zeros())
    assert np.all(read_bytes(smtx(np.ones((2, 2))), "layer.smtx").matrix.data == 1)


@given(WEIGHTS, st.sampled_from([np.float32, np.float64]))
def test_safetensors_round_trip(weights, kind):
    content = save_tensors({"bias": np.ones(3, np.float32), "weight": weights.astype(kind)})
    assert read_bytes(content, "model.safetensors").matrix == from_dense(weights)
    assert read_bytes(content, "model.safetensors", tensor="weight").matrix == from_dense(weights)


def test_safetensors_convolution_and_choice():
    kernel = np.arange(2 * 3 * 2 * 2, dtype=np.float16).reshape(2, 3, 2, 2)
    content = save_tensors({"conv": kernel, "fc": np.eye(2, dtype=np.float32)})
    assert read_bytes(content, "m.safetensors", tensor="conv").matrix == from_dense(kernel.reshape(2, 12))
    assert read_bytes(content, "m.safetensors", tensor="fc").matrix == from_dense(np.eye(2))
    with pytest.raises(BadMatrix, match="holds 2 weights; choose one by --tensor, or tensor=: conv, fc"):
        read_bytes(content, "m.safetensors")


def test_safetensors_bfloat16():
    header = b'{"w":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}}'
    upper_halves = np.array([[1.5, 0], [0, -2]], dtype=np.float32).view(np.uint32) >> 16
    content = len(header).to_bytes(8, "little") + header + upper_halves.astype("<u2").tobytes()
    assert read_bytes(content, "m.safetensors").matrix == from_dense(np.array([[1.5, 0], [0, -2]]))


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.bool_, np.uint8, np.int64])
def test_a_weight_and_its_mask_are_one_layer(kind):
    """As torch.nn.utils.prune keeps both in a state dict; a bias likewise."""
    rng = np.random.default_rng(0)
    weights, kept = rng.normal(size=(6, 4, 3, 3)).astype(np.float32), rng.random((6, 4, 3, 3)) < 0.3
    bias, kept_bias = rng.normal(size=6).astype(np.float32), np.arange(6) % 2 == 0
    tensors = {"conv.weight_orig": weights, "conv.weight_mask": kept.astype(kind)}
    tensors |= {"conv.bias_orig": bias, "conv.bias_mask": kept_bias.astype(np.float32)}
    content = save_tensors(tensors | {"fc.weight": np.eye(2, dtype=np.float32)})
    assert tensors_of_model(content, "m.safetensors").weights == {"conv.weight": True, "fc.weight": False}
    masked = from_dense((weights * kept).reshape(6, 36))
    assert read_bytes(content, "m.safetensors", tensor="conv.weight").matrix == masked
    layers = dict(read_model(content, "m.safetensors"))
    assert layers["conv.weight"].matrix == masked
    assert np.array_equal(layers["conv.weight"].bias, bias * kept_bias)


@pytest.mark.parametrize(
    "others",
    [
        {"w_mask": np.ones((2, 3), np.float32)},  # of another shape
        {"w_mask": np.ones((2, 2), np.float32), "w": np.eye(2, dtype=np.float32)},  # the product is there
        {"mask": np.ones((2, 2), np.float32)},
    ],
    ids=["shape", "product", "name"],
)
def test_what_is_no_mask_of_a_weight_is_a_weight(others):
    content = save_tensors({"w_orig": np.eye(2, dtype=np.float32), **others})
    assert set(tensors_of_model(content, "m.safetensors").weights) == {"w_orig", *others}


@pytest.mark.parametrize("name", ["layer.npy", "upload", "", "layer.bin", "a/b/LAYER.NPY", "C:\\x\\layer.npy"])
def test_the_name_need_not_tell_the_format(name):
    file = read_bytes(saved(np.save, np.eye(2)), name)
    assert file.matrix == from_dense(np.eye(2))
    assert file.name == (name.replace("\\", "/").rpartition("/")[2] or "matrix")


def test_read_takes_a_path(tmp_path):
    path = tmp_path / "layer.smtx"
    path.write_bytes(smtx(np.eye(3)))
    assert read(path, seed=3) == read_bytes(path.read_bytes(), "layer.smtx", seed=3)
    assert read(path) == read(path, seed=0) != read(path, seed=1)


@needs_real_layers
def test_real_matrices():
    with (REAL_LAYERS / "INDEX.csv").open() as stream:
        listed = list(csv.DictReader(stream))
    assert listed
    for row in listed:
        file = read(REAL_LAYERS / row["path"])
        matrix = file.matrix
        assert (matrix.m, matrix.k, matrix.nnz) == (int(row["rows"]), int(row["cols"]), int(row["nnz"])), row["path"]
        assert int(row["empty_rows"]) == np.count_nonzero(matrix.row_nnz == 0)
        assert file.values == ("drawn" if row["path"].endswith(".smtx") else "stored")
