"""What a product is like, against its definition; the same matrix has the same traits."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lospmm.families import traits
from lospmm.families.traits import BLOCK, traits_of
from lospmm.matrix.csr import from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Problem
from lospmm_datasets.synthetic import uniform


def by_definition(dense: np.ndarray) -> tuple[float, float, float]:
    lengths = np.count_nonzero(dense, axis=1)
    filled = lengths[lengths > 0]
    blocks = [
        np.count_nonzero(dense[row : row + BLOCK, column : column + BLOCK])
        for row in range(0, dense.shape[0], BLOCK)
        for column in range(0, dense.shape[1], BLOCK)
    ]
    touched = [count for count in blocks if count]
    fill = sum(touched) / (len(touched) * BLOCK * BLOCK) if touched else 0.0
    return len(filled) / len(lengths), (max(filled) / np.mean(filled) if len(filled) else 0.0), fill


@given(st.integers(1, 70), st.integers(1, 70), st.floats(0, 1), st.integers(0, 99))
def test_traits_are_what_they_say(m: int, k: int, density: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dense = (rng.random((m, k)) < density * rng.random((m, 1))).astype(np.float32)
    found = traits_of(Problem(from_dense(dense), 7, DEVICES["h200"]))
    np.testing.assert_allclose((found.filled_rows, found.longest_row, found.block_fill), by_definition(dense))
    assert (found.m, found.k, found.n, found.nnz) == (m, k, 7, np.count_nonzero(dense))


def test_types_are_told_apart() -> None:
    matrix = from_dense(np.eye(4, dtype=np.float32))
    found = {name: traits_of(Problem(matrix, 8, DEVICES["h200"], dtype=dtype)) for name, dtype in DTYPES.items()}
    assert [found[name].element_bytes for name in ("float32", "tf32", "float16", "bfloat16")] == [4, 4, 2, 2]
    assert [found[name].is_exact for name in DTYPES] == [True, False, False, False]


def test_a_sample_is_like_the_whole() -> None:
    problem = Problem(uniform(2048, 1024, 0.8, 1), 8, DEVICES["h200"])
    sampled = traits_of(problem)
    assert problem.matrix.nnz > 3 * traits.SAMPLED_NONZEROS
    assert sampled == traits_of(problem) and abs(sampled.block_fill / 0.2 - 1) < 0.02
