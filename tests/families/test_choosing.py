"""A choice without a measurement looks at a matrix's nonzeros a few times, however many plans there are."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lospmm.families import FAMILIES, block_group_coo, blocks, gathered_panels, panels
from lospmm.families.blocks import fills, lengths_of_block_rows, strips_of
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Problem
from lospmm.tuning.contenders import contenders
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
    known = plans_for(problem, contenders(tuple(FAMILIES), problem, is_unrolled=False))
    assert len(known.plans) > 300
    assert sum(counted) < 4 * nnz


@pytest.mark.parametrize("density", [0.004, 0.02, 0.5])
@pytest.mark.parametrize("empty", [0, 100, 300])
def test_rows_of_b_are_numbered_as_by_all_nonzeros(density: float, empty: int) -> None:
    weights = np.random.default_rng(1).random((400, 400)) < density
    weights[:, 400 - empty :] = False
    matrix = from_dense(weights.astype(np.float32))
    filled = int(np.count_nonzero(weights.any(axis=0)))
    listed = filled < panels.WORTH_LISTING * 400
    assert panels.numbered_rows(matrix) == ((filled if listed else 400), listed)


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


def test_plans_of_panels_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``fits`` says one by one; the columns are counted once."""
    problem = problem_of(uniform(256, 192, 0.9, seed=1), 96)
    found, asked = gathered_panels.plans(problem), []
    assert found and all(gathered_panels.fits(plan, problem) for plan in found)
    numbered = panels.numbered_rows
    monkeypatch.setattr(gathered_panels, "numbered_rows", lambda matrix: asked.append(matrix) or numbered(matrix))
    assert gathered_panels.plans(replace(problem)) == found and len(asked) == 1


def test_a_fingerprint_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = from_dense(np.eye(5, dtype=np.float32))
    before = matrix.fingerprint
    monkeypatch.setattr("lospmm.matrix.csr.hashlib.sha256", None)
    assert matrix.fingerprint == before and hash(matrix) == hash(before)
