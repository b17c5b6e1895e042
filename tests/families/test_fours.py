"""Columns in fours: nothing is lost, no row has more than two, and random matrices up to 80 % zeros fit."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lospmm.families.fours import Fours, choose_fours, fours_of
from lospmm.matrix.csr import SparseMatrix, from_dense
from tests.families.matrices import matrices, pruned


def order_in_fours(matrix: SparseMatrix, first: int, rows: int, *, multiple: int = 1) -> Fours:
    return fours_of(matrix, first, rows, choose_fours(matrix, first, rows, multiple=multiple))


def restored(fours: Fours, k: int) -> NDArray[np.float32]:
    """The rows again, from what is left of them."""
    rows = len(fours.weights)
    dense = np.zeros((rows, k), dtype=np.float32)
    columns = np.take_along_axis(fours.columns.reshape(1, -1, 4), fours.places.astype(np.int64), axis=2)
    np.add.at(dense, (np.arange(rows)[:, np.newaxis, np.newaxis], columns), fours.weights)
    return dense


@settings(max_examples=100)
@given(matrices(max_m=140, max_k=90), st.sampled_from([64, 128, 192]), st.sampled_from([1, 16]), st.data())
def test_any_rows_are_restored(matrix: SparseMatrix, rows: int, multiple: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, matrix.m - 1))
    fours = order_in_fours(matrix, first, rows, multiple=multiple)
    exact = np.zeros((rows, matrix.k), dtype=np.float32)
    there = matrix.to_scipy().toarray()[first : first + rows]
    exact[: len(there)] = there
    assert np.array_equal(restored(fours, matrix.k), exact)
    assert (fours.places[:, :, 0] < fours.places[:, :, 1]).all() and fours.places.max() < 4
    count = len(fours.columns) // 4
    assert count >= multiple and count % multiple == 0 and fours.columns.max() < matrix.k
    assert np.count_nonzero(fours.weights) == np.count_nonzero(exact)  # each nonzero in one place


@pytest.mark.parametrize(
    ("rows", "k", "density", "most"),
    [
        *((192, 768, 0.1, 1.0), (192, 768, 0.2, 1.02), (192, 768, 0.3, 1.16), (192, 768, 0.5, 1.39)),
        *((192, 4096, 0.2, 1.005), (192, 4096, 0.3, 1.145), (192, 4096, 0.4, 1.325), (192, 4096, 0.5, 1.35)),
        *((64, 4096, 0.2, 1.0), (64, 4096, 0.3, 1.01), (64, 4096, 0.4, 1.155), (64, 4096, 0.5, 1.27)),
    ],
)
def test_what_is_pruned_without_a_pattern_fits(rows: int, k: int, density: float, most: float) -> None:
    """Places beyond the columns themselves. In the order in which they come hardly a four would do at 80 %."""
    fours = order_in_fours(pruned(rows, k, density, seed=1), 0, rows)
    assert len(fours.columns) <= most * k


@pytest.mark.parametrize(
    ("rows", "k", "density"), [(192, 768, 0.1), (192, 768, 0.2), (128, 2304, 0.2), (192, 4096, 0.2), (64, 512, 0.25)]
)
@pytest.mark.parametrize("seed", range(2))
def test_no_chunk_more_for_a_few_columns(rows: int, k: int, density: float, seed: int) -> None:
    """Without changing places a four or two more than columns need, and so 16 more."""
    matrix = pruned(rows, k, density, seed=seed)
    fours = order_in_fours(matrix, 0, rows, multiple=16)
    assert len(fours.columns) == k == len(set(fours.columns.tolist()))
    assert np.array_equal(restored(fours, k), matrix.to_scipy().toarray())


@pytest.mark.parametrize(
    ("k", "density", "chunks"), [(768, 0.3, 14), (768, 0.5, 17), (4096, 0.3, 74), (4096, 0.4, 85), (4096, 0.5, 87)]
)
def test_chunks_where_columns_come_twice(k: int, density: float, chunks: int) -> None:
    fours = order_in_fours(pruned(192, k, density, seed=2), 0, 192, multiple=16)
    assert len(fours.columns) <= 64 * chunks


def test_where_no_places_can_be_changed_nothing_is_lost() -> None:
    """Five full columns, of which no four takes three, make two chunks of what else would be one."""
    dense = np.tile(np.eye(64, dtype=np.float32), (1, 2))[:, :68]
    dense[:, :5] = 1
    matrix = from_dense(dense)
    fours = order_in_fours(matrix, 0, 64, multiple=16)
    assert np.array_equal(restored(fours, 68), dense) and len(fours.columns) == 128


def test_no_more_fours_than_there_have_to_be() -> None:
    """Four full columns fill two, and a nonzero more needs a third."""
    dense = np.ones((64, 5), dtype=np.float32)
    dense[1:, 4] = 0
    assert len(order_in_fours(from_dense(dense), 0, 64).columns) == 12


def test_columns_without_a_nonzero_have_no_place() -> None:
    dense = np.zeros((64, 400), dtype=np.float32)
    dense[:, 7::10] = 1
    assert set(order_in_fours(from_dense(dense), 0, 64).columns.tolist()) == set(range(7, 400, 10))


def test_where_nothing_is_zero_there_are_about_two_places_a_column() -> None:
    """Half fit, half of the rest, and so on; the last few do not fill their fours."""
    fours = order_in_fours(from_dense(np.ones((64, 80), dtype=np.float32)), 0, 64)
    assert 160 <= len(fours.columns) <= 176 and set(fours.columns.tolist()) == set(range(80))


def test_rows_without_a_nonzero_have_one_empty_chunk() -> None:
    fours = order_in_fours(from_dense(np.zeros((64, 80), dtype=np.float32)), 0, 64, multiple=16)
    assert len(fours.columns) == 64 and not fours.weights.any()


@settings(max_examples=200)
@given(st.integers(9, 20), st.integers(1, 63), st.sampled_from([2, 4]), st.floats(0.2, 0.6), st.integers(0, 2**32 - 1))
@example(13, 11, 2, 0.39, 792)
@example(14, 11, 4, 0.39, 1093)
def test_what_fills_up_a_four_is_a_column(k: int, rows: int, multiple: int, density: float, seed: int) -> None:
    """Also where all columns come once, with places left over."""
    rng = np.random.default_rng(seed)
    matrix = from_dense((rng.random((rows, k)) < density).astype(np.float32))
    choice = choose_fours(matrix, 0, 64, multiple=multiple)
    assert choice.columns.max() < k
    assert np.array_equal(restored(fours_of(matrix, 0, 64, choice), k)[:rows], matrix.to_scipy().toarray())
