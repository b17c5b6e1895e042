"""The canonical matrix: what it accepts, what it refuses, and that its fingerprint is the function's identity."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lospmm.errors import BadMatrix
from lospmm.matrix.csr import MAX_DIMENSION, check_nonzeros, expand_offsets, from_coo, from_csr, from_dense
from lospmm.settings import settings
from tests.fixtures.files import WEIGHTS


def integers(*values, dtype=np.int64):
    return np.array(values, dtype=dtype)


@given(WEIGHTS)
def test_dense_round_trip(weights):
    matrix = from_dense(weights)
    assert np.array_equal(matrix.to_scipy().toarray(), weights)
    assert matrix.nnz == np.count_nonzero(weights)
    assert not np.any(matrix.data == 0)
    assert np.array_equal(matrix.row_nnz, np.count_nonzero(weights, axis=1))
    for array in (matrix.indptr, matrix.indices, matrix.data):
        assert not array.flags.writeable


@given(WEIGHTS, st.randoms(use_true_random=False))
def test_fingerprint_ignores_order_and_explicit_zeros(weights, random):
    rows, cols = np.indices(weights.shape).reshape(2, -1)
    order = np.array(random.sample(range(weights.size), weights.size))
    values = weights.ravel()[order]
    shuffled = from_coo(weights.shape, rows[order], cols[order], values)
    assert shuffled == from_dense(weights)
    assert hash(shuffled) == hash(from_dense(weights))


@given(WEIGHTS)
def test_fingerprint_tells_shapes_and_values_apart(weights):
    matrix = from_dense(weights)
    wider = np.pad(weights, ((0, 0), (0, 1)))
    assert from_dense(wider).fingerprint != matrix.fingerprint
    assert from_dense(wider + 1).fingerprint != from_dense(wider).fingerprint or np.all(wider + 1 == wider)


@given(WEIGHTS, st.sampled_from([np.uint8, np.int16, np.uint32, np.uint64, np.dtype(">i4")]))
def test_csr_takes_every_integer_type(weights, kind):
    matrix = from_dense(weights)
    again = from_csr(weights.shape, matrix.indptr.astype(kind), matrix.indices.astype(kind), matrix.data)
    assert again == matrix


@pytest.mark.parametrize("kind", [np.bool_, np.int8, np.uint64, np.float16, np.float64, np.dtype(">f4")])
def test_values_of_every_real_type(kind):
    weights = np.array([[1, 0, 1], [0, 0, 1]]).astype(kind)
    assert np.array_equal(from_dense(weights).to_scipy().toarray(), weights.astype(np.float32))


def test_values_that_vanish_in_float32_are_zeros():
    assert from_dense(np.array([[1e-60, 2.0]])).nnz == 1


ONE = np.ones(1, dtype=np.float32)


@pytest.mark.parametrize(
    ("shape", "rows", "cols", "values", "words"),
    [
        ((2, 2), integers(2), integers(0), ONE, "row index number 0 is 2, outside 0 to 1"),
        ((2, 2), integers(0), integers(-1), ONE, "column index number 0 is -1, outside 0 to 1"),
        ((2, 2), integers(2**64 - 1, dtype=np.uint64), integers(0), ONE, "is 18446744073709551615, outside"),
        ((2, 300), integers(0), integers(-1, dtype=np.int8), ONE, "outside 0 to 299"),
        ((2, 2), np.array([0.0]), integers(0), ONE, "is an integer, not float64"),
        ((2, 2), integers(0, 0), integers(0), ONE, "do not match"),
        ((2, 2), integers(0), integers(0), ONE.reshape(1, 1), "do not match"),
        ((2, 2), integers(1, 1), integers(0, 0), np.ones(2), "row 1, column 0 is given twice"),
        ((2, 2), integers(0), integers(1), np.array([np.nan]), "row 0, column 1: nan is not a finite float32"),
        ((2, 2), integers(0), integers(1), np.array([-np.inf]), "-inf is not a finite"),
        ((2, 2), integers(0), integers(1), np.array([1e39]), "1e+39 is not a finite float32"),
        ((2, 2), integers(0), integers(1), np.array([1j]), "complex128 are not real"),
        ((2, 2), integers(0), integers(1), np.array([object()]), "object are not real"),
        ((0, 2), integers(), integers(), ONE[:0], "shape (0, 2)"),
        ((2, 2, 2), integers(), integers(), ONE[:0], "shape (2, 2, 2)"),
        ((MAX_DIMENSION + 1, 2), integers(), integers(), ONE[:0], f"from 1 to {MAX_DIMENSION}"),
    ],
)
def test_refuses_entries(shape, rows, cols, values, words):
    with pytest.raises(BadMatrix) as caught:
        from_coo(shape, rows, cols, values)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        (integers(0, 2), "2 rows (or columns) need 3 offsets"),
        (integers(0, 3, 2), "offset number 1 is 3, outside 0 to 2"),
        (integers(0, -1, 2), "offset number 1 is -1"),
        (integers(1, 2, 2), "run from 1 to 2, not from 0 to 2"),
        (integers(0, 1, 1), "run from 0 to 1, not from 0 to 2"),
        (integers(2, 1, 2), "fall after number 0"),
        (integers(0, 2**63, 2, dtype=np.uint64), "outside 0 to 2"),
        (np.array([0.0, 1.0, 2.0]), "not float64"),
    ],
)
def test_refuses_offsets(offsets, words):
    with pytest.raises(BadMatrix) as caught:
        from_csr((2, 2), offsets, integers(0, 1), np.ones(2))
    assert words in str(caught.value)


def test_offsets_that_only_rise_modulo_two_to_the_64():
    """Differences of these are all positive and add up to 1, with wrap-around."""
    offsets = integers(0, 2**62, 2**63, 3 * 2**62, 1, dtype=np.uint64)
    with pytest.raises(BadMatrix, match="outside 0 to 1"):
        expand_offsets(offsets, 4, 1)


def test_largest_positions_do_not_overflow():
    last = MAX_DIMENSION - 1
    matrix = from_coo((MAX_DIMENSION, MAX_DIMENSION), integers(last, 0), integers(last, 0), np.array([2.0, 1.0]))
    assert matrix.indices.tolist() == [0, last]
    assert matrix.row_nnz[last] == 1


def test_limit_of_nonzeros():
    limit = settings().max_nonzeros
    check_nonzeros(limit)
    with pytest.raises(BadMatrix, match=f"{limit + 1} nonzeros, more than the {limit} .*LOSPMM_MAX_NONZEROS"):
        check_nonzeros(limit + 1)


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2)])
def test_dense_has_two_dimensions(shape):
    with pytest.raises(BadMatrix, match="two dimensions"):
        from_dense(np.ones(shape))


@pytest.mark.parametrize("given", [[1.0, 2.0], np.ma.array([1.0, 2.0], mask=[True, False]), None])
def test_what_is_no_array_is_refused(given):
    """A mask would be lost."""
    with pytest.raises(BadMatrix, match=f"the values are of type {type(given).__name__}: give a NumPy array"):
        from_csr((2, 2), integers(0, 1, 2), integers(0, 1), given)
    with pytest.raises(BadMatrix, match=f"the weights are of type {type(given).__name__}: give a NumPy array"):
        from_dense(given)


@pytest.mark.parametrize("shape", [(2.5, 2), ("2", 2), None, 4])
def test_a_shape_is_of_whole_numbers(shape):
    with pytest.raises(BadMatrix, match=r"shape .*: a matrix has two sides, each from 1 to"):
        from_coo(shape, integers(0), integers(0), np.ones(1))
