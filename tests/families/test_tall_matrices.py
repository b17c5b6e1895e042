"""Matrices of many rows: what is done for some of them takes as long as these, not as long as all."""

import numpy as np
import pytest

from lospmm.families import FAMILIES, blocks
from lospmm.matrix.csr import SparseMatrix, from_coo
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Problem


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("bitmap", "float16"),
        ("tensor_core", "float16"),
        ("tensor_core", "tf32"),
        ("block_group_coo", "float32"),
        ("hyb", "float32"),
    ],
)
def test_rows_are_counted_a_few_times(family: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.arange(0, 8192, 3) if family != "block_group_coo" else np.arange(8192).repeat(16)
    cols = rows % 64 if family != "block_group_coo" else (rows // 16 * 16 + np.arange(len(rows)) % 16) % 64
    matrix = from_coo((8192, 64), rows, cols, np.ones(len(rows)))
    calls: list[int] = []
    counted = SparseMatrix.row_nnz.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(SparseMatrix, "row_nnz", property(lambda self: calls.append(self.m) or counted(self)))
    monkeypatch.setattr(blocks, "SAMPLED_NONZEROS", matrix.nnz // 2)  # as of millions
    problem, row = Problem(matrix, 8, DEVICES["h200"], dtype=DTYPES[dtype]), FAMILIES[family]
    plans = list(row.plans(problem))
    row.pack(problem, plans[int(row.forecast(problem, plans).argmin())])
    assert calls.count(matrix.m) < 64
