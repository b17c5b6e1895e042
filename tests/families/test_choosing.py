"""A choice without a measurement looks at a matrix's nonzeros a few times, however many plans there are."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lospmm.families import FAMILIES, block_group_coo, blocks, warpgroups
from lospmm.families.blocks import fills, lengths_of_block_rows, strips_of
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Problem
from lospmm.tuning.plans import plans_for
from lospmm_datasets.synthetic import uniform

H200 = DEVICES["h200"]


def problem_of(matrix: SparseMatrix, n: int = 512, dtype: str = "float16") -> Problem:
    return Problem(matrix, n, H200, dtype=DTYPES[dtype])


@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_nonzeros_are_looked_at_a_few_times(sparsity: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the lengths of what NumPy counts: samples of the nonzeros."""
    problem = problem_of(uniform(1024, 1024, sparsity, seed=3))
    nnz, counted = problem.matrix.nnz, []
    bincount: Callable[..., Any] = np.bincount

    def watched(values: Any, *rest: Any, **named: Any) -> Any:
        counted.append(len(values))
        return bincount(values, *rest, **named)

    def of_a_strip(matrix: SparseMatrix) -> Any:
        assert matrix.nnz < nnz, "the rows of all nonzeros are written out"
        return np.repeat(np.arange(matrix.m, dtype=np.int32), matrix.row_nnz)

    monkeypatch.setattr(np, "bincount", watched)
    monkeypatch.setattr(blocks, "SAMPLED_NONZEROS", nnz // 8)
    monkeypatch.setattr(SparseMatrix, "rows_of_nonzeros", of_a_strip)
    known = plans_for(problem, tuple(FAMILIES))
    assert len(known.plans) > 150
    assert sum(counted) < 4 * nnz


@pytest.mark.parametrize("density", [0.004, 0.02, 0.5])
@pytest.mark.parametrize("empty", [0, 100, 300])
def test_columns_are_left_out_as_by_all_nonzeros(density: float, empty: int) -> None:
    weights = np.random.default_rng(1).random((400, 400)) < density
    weights[:, 400 - empty :] = False
    matrix = from_dense(weights.astype(np.float32))
    filled = int(np.count_nonzero(weights.any(axis=0)))
    assert warpgroups.leaves_columns_out(matrix) == (filled < warpgroups.WORTH_LISTING * 400)


def test_large_matrices_are_counted_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    there = np.kron(rng.random((64, 40)) < 0.2, np.ones((16, 16))) * (rng.random((1024, 640)) < 0.8)
    matrix = from_dense(there[:1000].astype(np.float32))
    assert strips_of(matrix) is matrix
    whole = block_group_coo._counted(matrix)
    assert whole.share == 1.0 and whole.fills == fills(matrix, lengths_of_block_rows(matrix))
    monkeypatch.setattr(blocks, "SAMPLED_NONZEROS", matrix.nnz // 2)
    strips = strips_of(matrix)
    assert strips.m in (8 * 64, 7 * 64 + 1000 % 64) and strips.k == matrix.k
    assert strips_of(matrix).fingerprint == strips.fingerprint
    rows = {row.tobytes() for row in matrix.to_scipy().toarray()}
    assert all(row.tobytes() in rows for row in strips.to_scipy().toarray())
    block_group_coo._counted.cache_clear()
    problem = problem_of(matrix)
    plans = block_group_coo.plans(problem)
    assert 0.4 < block_group_coo._counted(matrix).share < 0.6
    sampled = block_group_coo.forecast(problem, plans)
    block_group_coo._counted.cache_clear()
    monkeypatch.undo()
    np.testing.assert_allclose(sampled, block_group_coo.forecast(problem, plans), rtol=0.2)
    assert block_group_coo.pack_plan(problem, plans[0]).launch.block


def test_a_fingerprint_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = from_dense(np.eye(5, dtype=np.float32))
    before = matrix.fingerprint
    monkeypatch.setattr("lospmm.matrix.csr.hashlib.sha256", None)
    assert matrix.fingerprint == before and hash(matrix) == hash(before)
