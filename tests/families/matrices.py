"""Matrices that kernel families are tried on."""

import numpy as np
from hypothesis import strategies as st

from lospmm.matrix.csr import SparseMatrix, from_dense


def pruned(
    m: int, k: int, density: float, *, seed: int, empty_rows: float = 0.0, dense_row: bool = False
) -> SparseMatrix:
    """Random weights at random places; some rows empty, and perhaps one full."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((m, k), dtype=np.float32) * (rng.random((m, k)) < density)
    weights[rng.random(m) < empty_rows] = 0
    if dense_row:
        weights[int(rng.integers(m))] = rng.standard_normal(k, dtype=np.float32) + 3
    return from_dense(weights)


def matrices(*, max_m: int, max_k: int, min_k: int = 1) -> st.SearchStrategy[SparseMatrix]:
    return st.builds(
        pruned,
        st.integers(1, max_m),
        st.integers(min_k, max_k),
        st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
        seed=st.integers(0, 99),
        empty_rows=st.sampled_from([0.0, 0.5]),
        dense_row=st.booleans(),
    )
