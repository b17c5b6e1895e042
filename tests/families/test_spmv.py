"""The spmv family on the CPU, against float64: plans, both types, every epilogue, columns, rows of any length."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.cpu.block import execute_packed
from lospmm.errors import Unsupported
from lospmm.families import spmv
from lospmm.families.spmv import STEPS, SpmvPlan, arrays_of, bounds_of, forecast, pack_plan, plans, refusal, split_of
from lospmm.matrix.csr import SparseMatrix, from_coo, from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import epilogue_of
from lospmm.problem.problem import Problem
from tests.families.matrices import matrices, pruned
from tests.families.products import binary_of, error_of, plain
from tests.fixtures.covering import covering

H200 = DEVICES["h200"]
HALF = DTYPES["float16"]

BASE = SpmvPlan(warps=8, blocks=1)

#: Of few SMs, and so of few blocks.
SMALL = replace(H200, sms=22)


@pytest.mark.parametrize(
    ("plan", "n", "dtype"),
    covering([SpmvPlan(8, 1), SpmvPlan(16, 3), SpmvPlan(32, 1, ahead=2)], [1, 2, 3, 4, 5, 8], ["float16", "bfloat16"]),
    ids=str,
)
def test_both_types_columns_and_blocks_of_several_rows(plan: SpmvPlan, n: int, dtype: str) -> None:
    problem = Problem(pruned(150, 250, 0.3, seed=1, empty_rows=0.1, dense_row=True), n, SMALL, dtype=DTYPES[dtype])
    assert error_of(problem, pack_plan(problem, plan)) < 1


@pytest.mark.parametrize(
    ("m", "k", "density"), [(1, 1, 1.0), (2, 9000, 0.6), (3000, 1, 0.5), (40, 3000, 0.02), (20, 64, 0.0)]
)
def test_long_short_and_empty_rows(m: int, k: int, density: float) -> None:
    """A row that several warps share; rows that a warp has many of; columns far apart; no nonzeros."""
    matrix = pruned(m, k, density, seed=2)
    for n in (1, 8):
        problem = Problem(matrix, n, SMALL, dtype=HALF)
        assert error_of(problem, pack_plan(problem, BASE)) < 1


@settings(max_examples=8)
@given(matrices(max_m=70, max_k=700), st.sampled_from(["float16", "bfloat16"]), st.integers(1, 8))
def test_any_matrix(matrix: SparseMatrix, dtype: str, n: int) -> None:
    problem = Problem(matrix, n, SMALL, dtype=DTYPES[dtype])
    assert error_of(problem, pack_plan(problem, BASE)) < 1


@pytest.mark.parametrize(("relu", "residual", "bias"), covering(*3 * [[False, True]]))
def test_every_epilogue(relu: bool, residual: bool, bias: bool) -> None:
    epilogue = epilogue_of(np.linspace(-1, 1, 37) if bias else None, relu=relu, residual=residual)
    problem = Problem(pruned(37, 130, 0.3, seed=4, empty_rows=0.3), 1, H200, epilogue=epilogue, dtype=HALF)
    assert error_of(problem, pack_plan(problem, BASE)) < 1


@settings(max_examples=30)
@given(
    matrices(max_m=400, max_k=900),
    st.sampled_from([SpmvPlan(8, 1), SpmvPlan(16, 2), SpmvPlan(32, 1, ahead=2)]),
    st.sampled_from([1, 8]),
)
def test_the_warps_of_all_blocks_have_all_nonzeros_once(matrix: SparseMatrix, plan: SpmvPlan, n: int) -> None:
    """Each lane's columns in order, in turns of a unit at least; what a warp begins with is where another stopped."""
    problem = plain(matrix, n, HALF)
    bounds, (grid, most), classes = bounds_of(problem, plan), split_of(plan, problem), spmv.layout_of(problem).classes
    assert (bounds[0], bounds[-1], len(bounds)) == (0, matrix.m, grid + 1)
    assert (np.diff(bounds) > 0).all() and np.diff(bounds).max() <= most
    arrays = arrays_of(problem, plan)
    room = arrays.units.shape[1] * STEPS
    found = np.zeros((matrix.m, matrix.k + classes * 16), np.float32)
    for block, first in enumerate(bounds[:-1]):
        units = arrays.units.reshape(len(arrays.places), -1)[block]
        held = units["values"].copy()
        if n == 8:
            held[..., *spmv.held_values()] = units["values"]
        values = held.transpose(0, 2, 1).reshape(-1, 32).view(np.float16)
        pairs = units["behinds"].transpose(0, 2, 1)
        behinds = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(-1, 32)
        turns, count = arrays.turns[block], bounds[block + 1] - first
        starts = turns["starts"] if n == 8 else np.zeros((count, 32), int)
        assert (turns["lengths"][:count] >= STEPS).all()
        ends = np.cumsum(turns["lengths"][:count].astype(int))
        assert arrays.places["units"][block].sum() == -(-ends[-1] // STEPS)
        for turn, end in enumerate(ends):
            begin = end - int(turns["lengths"][turn])
            at = starts[turn] + behinds[begin:end].cumsum(axis=0, dtype=int)
            rows = first + turns["rows"][turn].astype(int)[np.arange(32) % classes]
            columns = np.where(values[begin:end] != 0, (at - 1) * classes + np.arange(32) % classes, matrix.k)
            np.add.at(found, (np.broadcast_to(rows, at.shape), columns), values[begin:end])
            for warp in range(-(-begin // room), -(-end // room)):  # those that begin in the turn
                place = arrays.places[block, warp]
                read = starts[turn] + behinds[begin : warp * room].sum(axis=0, dtype=int)
                assert (place["turn"], place["left"]) == (turn, end - warp * room)
                assert place["is_continued"] == (begin < warp * room) and (place["behind"] == read).all()
        assert not values[ends[-1] :].any()
    expected = matrix.to_scipy().toarray().astype(np.float16).astype(np.float32)
    assert (found[:, : matrix.k] == expected).all() and not found[:, matrix.k :].any()


def test_what_is_not_a_number_stays_in_rows_with_near_nonzeros() -> None:
    problem = plain(pruned(60, 200, 0.3, seed=6, empty_rows=0.2, dense_row=True), 1, HALF)
    b = np.ones((200, 1), np.float32)
    b[[0, 70]] = np.nan
    c = execute_packed(pack_plan(problem, BASE), np.arange(1), b, m=60)
    takes = (problem.matrix.to_scipy().toarray()[:, [0, 70]] != 0).any(axis=1)
    assert 0 < takes.sum() < 60 and np.isnan(c[takes, 0]).all() and not np.isnan(c[~takes, 0]).any()


def test_a_row_with_nearly_all_nonzeros() -> None:
    """Room for all blocks is that of the largest, and a block has whole rows."""
    rows = np.concatenate([np.zeros(50_000, int), np.arange(1, 132)])
    cols = np.concatenate([np.arange(50_000), np.arange(131)])
    problem = plain(from_coo((132, 50_000), rows, cols, np.ones(len(rows))), 1, HALF)
    with pytest.raises(Unsupported, match="one row has too many"):
        pack_plan(problem, SpmvPlan(32, 1))


def test_plans_fit_and_denser_takes_longer() -> None:
    for m, k, n in ((512, 1024, 1), (1, 1, 1), (8, 30_000, 1), (28_672, 96, 4), (12_000, 96, 8)):
        problem = plain(pruned(m, k, 0.5, seed=7), n, HALF)
        found = plans(problem)
        shared = [spmv.shared_bytes(plan, problem, split_of(plan, problem).rows) for plan in found]
        assert found and max(shared) <= H200.shared_bytes_per_block
        assert (forecast(problem, found) > 0).all()
    thin, dense = (plain(pruned(2048, 2048, density, seed=8), 1, HALF) for density in (0.1, 1.0))
    assert forecast(thin, plans(thin)).min() < forecast(dense, plans(dense)).min()


def test_what_it_has_no_kernel_for() -> None:
    matrix = pruned(4, 9, 0.5, seed=9)
    assert refusal(plain(matrix, 1)) == "needs a 16-bit dtype, not float32"
    assert refusal(plain(matrix, 9, HALF)) == "more than 8 columns of B"
    wide = from_coo((1, 60_000), np.zeros(1, int), np.full(1, 7), np.ones(1))
    assert refusal(plain(wide, 1, HALF)) == "60,000 columns of A, and as many rows of B do not fit in shared memory"
    assert "sm_75" in str(refusal(Problem(matrix, 1, DEVICES["rtx2080ti"], dtype=HALF)))
    assert refusal(Problem(matrix, 1, DEVICES["a100"], dtype=HALF)) is None


SLOW = [("h200", 1, 1), ("h200", 2, 2), ("h200", 4, 1), ("a100", 1, 1), ("a100", 8, 2)]


@pytest.mark.parametrize(
    ("device", "n", "ahead"), [("h200", 8, 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_the_tightest_plan_does_not_spill(device: str, n: int, ahead: int) -> None:
    problem = Problem(from_dense(np.ones((64, 64))), n, DEVICES[device], dtype=HALF)
    most = max((plan for plan in plans(problem) if plan.ahead == ahead), key=lambda plan: plan.warps * plan.blocks)
    binary = binary_of(pack_plan(problem, most), problem.device.arch)
    assert (binary.spill_bytes, binary.stack_bytes) == (0, 0)
