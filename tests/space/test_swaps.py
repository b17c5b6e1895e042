"""Swaps of rows between tiles: what every swapped tiling must satisfy, and tiles that Algorithm 1 misses."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lospmm.codegen.lower import with_swaps
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem import long_rows
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space import swaps
from lospmm.space.candidates import Schedule, TileSize, Tiling, UnrolledPlan
from lospmm.space.registers import forecast_of_candidate
from lospmm.space.reorder import natural_order, regroup
from lospmm.space.swaps import swapped
from lospmm_datasets.synthetic import uniform
from tests.space.test_reorder import as_lists, check_tiling, matrices


def squares(tiling: Tiling) -> int:
    return int(((tiling.nnz + tiling.nnc) ** 2).sum())


def matrix_of(*rows: str) -> SparseMatrix:
    return from_dense(np.array([[cell == "x" for cell in row] for row in rows], dtype=np.float32))


def check_swapped(matrix: SparseMatrix, before: Tiling) -> Tiling:
    after = swapped(matrix, before)
    check_tiling(matrix, after)
    assert (after.size_limit, after.count) == (before.size_limit, before.count)
    assert squares(after) <= squares(before)
    assert as_lists(swapped(matrix, before)) == as_lists(after)
    return after


@given(matrices(), st.integers(1, 12), st.booleans())
def test_every_tiling_keeps_its_rows(matrix: SparseMatrix, limit: int, is_regrouped: bool) -> None:
    check_swapped(matrix, regroup(matrix, [limit])[limit] if is_regrouped else natural_order(matrix, limit))


@pytest.mark.parametrize(("sparsity", "share"), [(0.8, 0.98), (0.95, 0.93)])
def test_algorithm_1_leaves_loads_that_swaps_save(sparsity: float, share: float) -> None:
    matrix = uniform(256, 200, sparsity, seed=3)
    before = regroup(matrix, [16])[16]
    after = check_swapped(matrix, before)
    assert after.nnc.sum() < share * before.nnc.sum()
    assert squares(after) < squares(before)


def test_a_swap_counts_columns_that_both_rows_have() -> None:
    """The rows to swap have a column in common that no other row of their tiles has: it stays with both tiles."""
    matrix = matrix_of("xx....x", "..xx..x", "..xx...", "xx.....")
    before = natural_order(matrix, 2)
    after = check_swapped(matrix, before)
    assert sorted(rows.tolist() for rows in after.tiles) == [[0, 3], [1, 2]]
    assert (before.nnc.tolist(), after.nnc.tolist()) == ([5, 4], [3, 3])


def test_tiles_of_like_work_may_load_more() -> None:
    matrix = matrix_of("xxx.....", "...xxx..", "......x.", "......x.")
    before = natural_order(matrix, 2)
    after = check_swapped(matrix, before)
    assert (before.nnc.tolist(), after.nnc.tolist()) == ([6, 1], [4, 4])


def test_three_rows_of_a_tile_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = uniform(256, 200, 0.9, seed=3)
    before = regroup(matrix, [16])[16]
    after = check_swapped(matrix, before)
    monkeypatch.setattr(swaps, "TRIED", 1)
    assert squares(after) < squares(check_swapped(matrix, before))


def test_a_row_moves_into_a_tile_with_room() -> None:
    matrix = matrix_of("xx..", "xx..", "..xx", "..xx", "..xx")
    before = natural_order(matrix, 3)
    assert [rows.tolist() for rows in check_swapped(matrix, before).tiles] == [[0, 1], [2, 3, 4]]


def test_large_tilings_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = uniform(64, 64, 0.9, seed=0)
    tiling = natural_order(matrix, 8)
    assert swapped(matrix, tiling) is not tiling
    monkeypatch.setattr(swaps, "MAX_WORDS", 1000)
    assert swapped(matrix, tiling) is tiling


def test_swaps_take_no_more_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both long rows would share a tile, which takes one more sum: only where that register is allocated anyway."""
    monkeypatch.setattr(long_rows, "PRODUCTS", 5)
    long, like_long, other = "xxxxxx.....", "xxxxx......", "......xxxxx"
    matrix = matrix_of(long, like_long, like_long, other, long, other, other, other)
    problem, tiling = Problem(matrix, 64, DEVICES["h100"]), natural_order(matrix, 4)
    kept = set()
    for prefetch in range(1, 9):
        plan = UnrolledPlan(TileSize(4, 32), Schedule(prefetch), tiling)
        found = with_swaps(problem, plan)
        needs_more = forecast_of_candidate(problem, plan) < forecast_of_candidate(
            problem, replace(plan, tiling=swapped(matrix, tiling))
        )
        assert (found is plan) == needs_more
        kept.add(needs_more)
    assert kept == {False, True}
