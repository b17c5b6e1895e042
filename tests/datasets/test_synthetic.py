"""Matrices drawn from a seed: as many nonzeros as asked for, the same every time, and of the pattern that is named."""

import ast
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy._core import _multiarray_umath as umath

from lospmm.errors import BadRequest
from lospmm.matrix.csr import SparseMatrix
from lospmm_datasets.synthetic import _first, clustered, pruned_low_rank, uneven, uniform
from tests.docs.pages import ROOT

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


#: How the fingerprints of ``drawn()`` begin.
KNOWN = {"uniform": "3c57f4f9", "uneven": "6dc4d37d", "clustered": "1b1e261f", "low rank": "b1e78bab"}


def drawn() -> dict[str, str]:
    return {name: draw(300, 400, 0.9, 0).fingerprint[:8] for name, draw in DRAWS.items()}


def test_a_seed_is_the_same_matrix_on_every_cpu() -> None:
    """With what NumPy and BLAS do on this one, and on one with none of its vector instructions: what was measured of a
    matrix says of which one by its seed."""
    assert drawn() == KNOWN
    found = [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__[name]]
    script = "from tests.datasets.test_synthetic import drawn; print(drawn())"
    changed = {"NPY_DISABLE_CPU_FEATURES": " ".join(found), "OPENBLAS_CORETYPE": "Prescott"}
    command = [sys.executable, "-c", script]
    finished = subprocess.run(command, cwd=ROOT, env={**os.environ, **changed}, capture_output=True, text=True)
    assert ast.literal_eval(finished.stdout) == KNOWN, finished.stderr


def test_of_cells_that_are_equally_likely_the_last_are_taken() -> None:
    """np.argpartition takes others on other CPUs."""
    found = _first(np.array([[1, 3, 0], [3, 2, 3]], np.float32), 1 / 3, np.random.default_rng(0))
    assert (found.indptr.tolist(), found.indices.tolist()) == ([0, 2, 4], [0, 2, 1, 2])


def test_shares_of_rows_and_columns_are_empty_and_leave_room_for_the_rest() -> None:
    found = uneven(200, 100, 0.95, 1, rows=1.0, empty_rows=0.75, empty_columns=0.2)
    assert (found.nnz, int((found.row_nnz == 0).sum()), int((columns(found) == 0).sum())) == (1000, 150, 20)
    with pytest.raises(BadRequest, match="180 empty rows and 0 empty columns: no room"):
        uneven(200, 100, 0.8, 1, empty_rows=0.9)


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
