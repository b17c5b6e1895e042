"""The matrix in an artifact: read back unchanged, always the same bytes, and refused if it is another one."""

import io
from dataclasses import asdict

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from lospmm.artifact import artifact
from lospmm.artifact.artifact import MATRIX_FILE, Artifact
from lospmm.errors import BadRequest
from lospmm.matrix import readers
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.matrix.npz import write_npz
from tests.artifact.test_artifact import MANIFEST, made


def drawn(m: int, k: int, seed: int) -> SparseMatrix:
    rng = np.random.default_rng(seed)
    return from_dense(np.where(rng.random((m, k)) < 0.3, rng.normal(size=(m, k)), 0))


@given(m=st.integers(1, 12), k=st.integers(1, 12), seed=st.integers(0, 99))
def test_what_is_written_is_read_back(m: int, k: int, seed: int) -> None:
    matrix = drawn(m, k, seed)
    content = write_npz(matrix)
    assert readers.read_bytes(content, MATRIX_FILE).matrix == matrix
    assert (scipy.sparse.load_npz(io.BytesIO(content)) != matrix.to_scipy()).nnz == 0
    assert len(content) < 6 * matrix.nnz + 4 * m + 2000


@pytest.mark.parametrize(
    ("k", "value", "each"), [(1 << 16, 1.5, 4), ((1 << 16) + 1, 1.5, 6), (9999, 0.1, 6), (9999, 7e4, 6)]
)
def test_columns_and_values_take_two_bytes_where_they_fit(k: int, value: float, each: int) -> None:
    columns, values = np.arange(k - 1000, k, dtype=np.int32), np.full(1000, value, np.float32)
    matrix = SparseMatrix(1, k, np.array([0, 1000]), columns, values)
    content = write_npz(matrix)
    assert readers.read_bytes(content, MATRIX_FILE).matrix == matrix
    assert scipy.sparse.load_npz(io.BytesIO(content)).sum() == pytest.approx(1000 * value, rel=1e-3)
    assert each * matrix.nnz < len(content) < each * matrix.nnz + 1500


def test_the_same_matrix_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    content = write_npz(drawn(9, 7, 0))
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert write_npz(drawn(9, 7, 0)) == content
    assert write_npz(drawn(9, 7, 1)) != content


def kept(matrix: SparseMatrix, content: bytes | None) -> Artifact:
    manifest = {**asdict(MANIFEST), "fingerprint": matrix.fingerprint}
    return Artifact(manifest, {} if content is None else {MATRIX_FILE: content})


def test_the_matrix_of_an_artifact() -> None:
    matrix = drawn(9, 7, 0)
    assert kept(matrix, write_npz(matrix)).matrix() == matrix
    with pytest.raises(BadRequest, match=r"matrix\.npz is missing; tune it again"):
        kept(matrix, None).matrix()
    with pytest.raises(BadRequest, match=r"matrix\.npz holds another matrix"):
        kept(matrix, write_npz(drawn(9, 7, 1))).matrix()
    with pytest.raises(BadRequest, match=r"^kernel \w+: matrix\.npz: truncated or damaged"):
        kept(matrix, write_npz(matrix)[:-40]).matrix()


def test_an_artifact_without_its_matrix_is_still_one() -> None:
    files = {name: content for name, content in made().files.items() if name != MATRIX_FILE}
    assert artifact.from_files(files, "an old one").cubin
