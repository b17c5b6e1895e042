"""Sizes of which cuBLAS alone is timed."""

import numpy as np

from fitting.dense_times import DTYPES_DRAWN, MOST_ELEMENTS, MOST_PRODUCTS, NONZEROS, PROBLEMS, SIDES, drawn, scarce


def test_what_is_drawn_is_the_same_each_time_and_within_its_bounds() -> None:
    found = list(drawn())
    assert found == list(drawn()) and len(found) == PROBLEMS
    assert len({(m, k, n) for m, k, n, _ in found}) > 0.98 * PROBLEMS
    for m, k, n, dtype in found:
        assert SIDES[0] <= min(m, k) and max(m, k) <= SIDES[1] and dtype in DTYPES_DRAWN
        assert m * k * n <= MOST_PRODUCTS and n * (m + k) <= MOST_ELEMENTS


def test_a_is_nearly_empty() -> None:
    for m, k in ((24, 32), (4096, 4096)):
        matrix = scarce(m, k)
        assert (matrix.m, matrix.k) == (m, k)
        assert 0 < matrix.nnz <= min(m * k // 10 + 1, NONZEROS)
        assert np.abs(matrix.data).min() >= 0.5
