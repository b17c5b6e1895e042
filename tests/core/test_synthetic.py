"""Matrices drawn from a seed: as many nonzeros as asked for, the same every time, and of the pattern that is named."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.errors import BadRequest
from lospmm.matrix import SparseMatrix
from lospmm_datasets.synthetic import clustered, pruned_low_rank, uneven, uniform

DRAWS: dict[str, Callable[[int, int, float, int], SparseMatrix]] = {
    "uniform": uniform,
    "uneven": lambda m, k, sparsity, seed: uneven(m, k, sparsity, seed, rows=1.0, columns=0.5),
    "clustered": clustered,
    "low rank": pruned_low_rank,
}


@settings(max_examples=25)
@given(st.integers(1, 60), st.integers(1, 60), st.floats(0, 1), st.integers(0, 99))
@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_is_one_matrix_with_that_share_of_zeros(name: str, m: int, k: int, sparsity: float, seed: int) -> None:
    drawn = DRAWS[name](m, k, sparsity, seed)
    assert (drawn.m, drawn.k, drawn.nnz) == (m, k, round((1 - sparsity) * m * k))
    assert DRAWS[name](m, k, sparsity, seed).fingerprint == drawn.fingerprint


@pytest.mark.parametrize("name", DRAWS)
def test_a_share_of_zeros_beyond_all_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="from 0 to 1"):
        DRAWS[name](4, 4, 1.5, 0)


def variation(counts: np.ndarray) -> float:
    return float(counts.std() / counts.mean())


def columns(matrix: SparseMatrix) -> np.ndarray:
    return np.bincount(matrix.indices, minlength=matrix.k)


def test_patterns_are_what_their_names_say() -> None:
    plain = uniform(256, 320, 0.9, 0)
    rows, cols = uneven(256, 320, 0.9, 0, rows=1.0), uneven(256, 320, 0.9, 0, columns=1.0)
    assert variation(rows.row_nnz) > 3 * variation(plain.row_nnz)
    assert variation(columns(rows)) < 2 * variation(columns(plain))
    assert variation(columns(cols)) > 3 * variation(columns(plain))
    assert variation(cols.row_nnz) < 2 * variation(plain.row_nnz)
    blocks = clustered(256, 320, 0.9, 0, block=16, contrast=2.0)
    by_block = [one.to_scipy().toarray().astype(bool).reshape(16, 16, 20, 16).sum((1, 3)) for one in (plain, blocks)]
    assert variation(by_block[1]) > 3 * variation(by_block[0])
    low = pruned_low_rank(256, 320, 0.9, 0, rank=2, noise=0.1).to_scipy().toarray().astype(bool).astype(float)
    shared = low @ low.T  # rows that follow the same factors are kept in the same columns
    assert variation(shared) > 2 * variation(
        (plain.to_scipy() != 0).astype(float) @ (plain.to_scipy() != 0).T.toarray()
    )
