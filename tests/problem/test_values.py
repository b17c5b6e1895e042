"""8-bit values of A: within the promised error of each weight, and the nearest value."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.accuracy import accuracy_of, weights_held_to
from lospmm.problem.dtype import DTYPES
from lospmm.problem.values import VALUE_TYPES, ValueType
from tests.families.matrices import matrices

HALF = DTYPES["float16"]


def largest_of_rows(matrix: SparseMatrix) -> np.ndarray:
    """Of each nonzero's row."""
    rows = np.repeat(np.arange(matrix.m), np.diff(matrix.indptr))
    return abs(matrix.to_scipy().toarray()).max(axis=1)[rows]


@pytest.mark.parametrize("values", VALUE_TYPES.values(), ids=VALUE_TYPES)
@given(matrix=matrices(max_m=20, max_k=40))
def test_a_weight_is_held_within_the_bound(values: ValueType, matrix: SparseMatrix) -> None:
    held, accuracy = weights_held_to(HALF, matrix, values), accuracy_of(HALF, values=values)
    allowed = accuracy.a_rounding * abs(matrix.data) + accuracy.a_floor * largest_of_rows(matrix)
    assert (abs(held - matrix.data) <= allowed * (1 + 1e-5)).all()
    again = SparseMatrix(matrix.m, matrix.k, matrix.indptr, matrix.indices, held)
    assert np.allclose(values.held(again), held, rtol=1e-6, atol=0)


@pytest.mark.parametrize("values", VALUE_TYPES.values(), ids=VALUE_TYPES)
@given(row=st.lists(st.floats(-2, 2, width=32).filter(bool), min_size=1, max_size=50))
def test_no_other_code_is_nearer(values: ValueType, row: list[float]) -> None:
    matrix = from_dense(np.array([row], dtype=np.float32))
    scale = values.scales(matrix)
    known = values.decoded[np.isfinite(values.decoded)].astype(np.float64) * float(scale[0])
    nearest = np.abs(known[:, np.newaxis] - matrix.data).min(axis=0)
    assert np.allclose(
        np.abs(values.held(matrix) - matrix.data), nearest, rtol=1e-4, atol=1e-6 * abs(matrix.data).max()
    )


@pytest.mark.parametrize(("name", "error"), [("int8", 0.007), ("fp8_e4m3", 0.026)])
def test_error_of_normal_weights(name: str, error: float) -> None:
    """The figures of docs/accuracy.md."""
    rng = np.random.default_rng(0)
    matrix = from_dense(np.where(rng.random((200, 1000)) < 0.5, rng.standard_normal((200, 1000)), 0).astype(np.float32))
    off = VALUE_TYPES[name].held(matrix) - matrix.data
    assert np.sqrt((off**2).sum() / (matrix.data**2).sum()) == pytest.approx(error, rel=0.1)


def test_numbers_of_e4m3() -> None:
    decoded = VALUE_TYPES["fp8_e4m3"].decoded
    assert (decoded[0x7E], decoded[0x08], decoded[0x01], decoded[0xB8]) == (448, 2.0**-6, 2.0**-9, -1)
    assert np.isnan(decoded[[0x7F, 0xFF]]).all() and np.isfinite(decoded).sum() == 254


def test_the_codes_are_those_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")
    weights = np.random.default_rng(0).standard_normal((8, 500)).astype(np.float32)
    values, matrix = VALUE_TYPES["fp8_e4m3"], from_dense(weights)
    scaled = torch.from_numpy(weights / values.scales(matrix)[:, np.newaxis]).to(torch.float8_e4m3fn)
    assert np.array_equal(values.decoded[values.codes(matrix)].reshape(8, 500), scaled.float().numpy())
