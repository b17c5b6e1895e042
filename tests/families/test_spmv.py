"""The spmv family on the CPU, against float64: plans, both types, every epilogue, rows of any length."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.cpu.block import execute_packed
from lospmm.errors import Unsupported
from lospmm.families import spmv
from lospmm.families.spmv import SpmvPlan, arrays_of, bounds_of, forecast, pack_plan, plans, refusal, steps_of
from lospmm.matrix.csr import SparseMatrix, from_coo, from_dense
from lospmm.problem.convolution import Convolution
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("plan", [SpmvPlan(8, 1), SpmvPlan(16, 3)], ids=str)
def test_both_types_and_blocks_of_several_rows(plan: SpmvPlan, dtype: str) -> None:
    problem = plain(pruned(900, 250, 0.3, seed=1, empty_rows=0.1, dense_row=True), 1, DTYPES[dtype])
    assert error_of(problem, pack_plan(problem, plan)) < 1


@pytest.mark.parametrize(
    ("m", "k", "density"), [(1, 1, 1.0), (2, 9000, 0.6), (3000, 1, 0.5), (40, 3000, 0.02), (20, 64, 0.0)]
)
def test_long_short_and_empty_rows(m: int, k: int, density: float) -> None:
    """A row that several warps share; rows that a warp has many of; columns far apart; no nonzeros."""
    problem = plain(pruned(m, k, density, seed=2), 1, HALF)
    assert error_of(problem, pack_plan(problem, BASE)) < 1


@settings(max_examples=8)
@given(matrices(max_m=70, max_k=700), st.sampled_from(["float16", "bfloat16"]))
def test_any_matrix(matrix: SparseMatrix, dtype: str) -> None:
    problem = plain(matrix, 1, DTYPES[dtype])
    assert error_of(problem, pack_plan(problem, BASE)) < 1


@pytest.mark.parametrize(("relu", "residual", "bias"), covering(*3 * [[False, True]]))
def test_every_epilogue(relu: bool, residual: bool, bias: bool) -> None:
    epilogue = epilogue_of(np.linspace(-1, 1, 37) if bias else None, relu=relu, residual=residual)
    problem = Problem(pruned(37, 130, 0.3, seed=4, empty_rows=0.3), 1, H200, epilogue=epilogue, dtype=HALF)
    assert error_of(problem, pack_plan(problem, BASE)) < 1


@settings(max_examples=40)
@given(matrices(max_m=60, max_k=900))
def test_a_step_has_neighbours_of_one_row(matrix: SparseMatrix) -> None:
    """All nonzeros, in order, as many to a step as a warp has lanes or a byte reaches; at least one step for a row."""
    steps = steps_of(matrix)
    assert steps.first[0] == 0 and steps.first[-1] == matrix.nnz and set(steps.row) == set(range(matrix.m))
    for first, after, row in zip(steps.first[:-1], steps.first[1:], steps.row, strict=True):
        assert matrix.indptr[row] <= first and after <= matrix.indptr[row + 1]
        if after < matrix.indptr[row + 1]:  # no room for the next one
            start = matrix.indices[first] // 4 * 4
            assert after - first == 32 or matrix.indices[after] >= start + 256
            assert matrix.indices[after - 1] < start + 256


@settings(max_examples=40)
@given(matrices(max_m=400, max_k=90), st.sampled_from([SpmvPlan(8, 1), SpmvPlan(16, 2)]))
def test_blocks_and_warps_have_all_rows_once(matrix: SparseMatrix, plan: SpmvPlan) -> None:
    problem = plain(matrix, 1, HALF)
    bounds = bounds_of(problem, plan)
    assert bounds[0] == 0 and bounds[-1] == matrix.m and (np.diff(bounds) >= 0).all()
    places, units = arrays_of(problem, plan)
    assert places.shape == (len(bounds) - 1, plan.warps) and places["units"].max() <= units.shape[1]
    steps = np.bincount(steps_of(matrix).row, minlength=matrix.m)
    of_blocks = [steps[low:high].sum() for low, high in pairwise(bounds)]
    assert places["units"].sum(axis=1).tolist() == [-(-count // 8) for count in of_blocks]


def test_what_is_not_a_number_stays_in_its_rows() -> None:
    problem = plain(pruned(60, 200, 0.3, seed=6, empty_rows=0.2, dense_row=True), 1, HALF)
    b = np.ones((200, 1), np.float32)
    b[[0, 70]] = np.nan
    c = execute_packed(pack_plan(problem, BASE), np.arange(1), b, m=60)
    takes = (problem.matrix.to_scipy().toarray()[:, [0, 70]] != 0).any(axis=1)
    assert 0 < takes.sum() < 60 and np.isnan(c[takes, 0]).all() and not np.isnan(c[~takes, 0]).any()


def test_a_row_with_nearly_all_nonzeros() -> None:
    """Room for all blocks is that of the largest, and a block has whole rows."""
    rows = np.concatenate([np.zeros(60_000, int), np.arange(1, 3000)])
    cols = np.concatenate([np.arange(60_000), np.arange(2999)])
    problem = plain(from_coo((3000, 60_000), rows, cols, np.ones(len(rows))), 1, HALF)
    with pytest.raises(Unsupported, match="one row has too many"):
        pack_plan(problem, SpmvPlan(8, 3))


def test_plans_fit_and_denser_takes_longer() -> None:
    for m, k in ((512, 1024), (1, 1), (8, 30_000)):
        problem = plain(pruned(m, k, 0.5, seed=7), 1, HALF)
        found = plans(problem)
        assert found and all(spmv.shared_bytes(plan, problem) <= H200.shared_bytes_per_block for plan in found)
        assert (forecast(problem, found) > 0).all()
    thin, dense = (plain(pruned(2048, 2048, density, seed=8), 1, HALF) for density in (0.1, 1.0))
    assert forecast(thin, plans(thin)).min() < forecast(dense, plans(dense)).min()


def test_what_it_has_no_kernel_for() -> None:
    matrix = pruned(4, 9, 0.5, seed=9)
    convolution = Convolution(batch=1, channels=1, height=4, width=4, kernel_height=3, kernel_width=3)
    assert refusal(Problem(matrix, convolution.n, H200, convolution)) == "no convolutions"
    assert refusal(plain(matrix, 1)) == "needs a 16-bit dtype, not float32"
    assert refusal(plain(matrix, 2, HALF)) == "more than one column of B"
    wide = from_coo((1, 131_065), np.zeros(1, int), np.full(1, 7), np.ones(1))
    assert refusal(plain(wide, 1, HALF)) == "more than 131,064 columns of A"
    assert "sm_75" in str(refusal(Problem(matrix, 1, DEVICES["rtx2080ti"], dtype=HALF)))
    assert refusal(Problem(matrix, 1, DEVICES["a100"], dtype=HALF)) is None


@pytest.mark.parametrize("device", ["h200", pytest.param("a100", marks=pytest.mark.slow)])
def test_the_tightest_plan_does_not_spill(device: str) -> None:
    problem = Problem(from_dense(np.ones((64, 64))), 1, DEVICES[device], dtype=HALF)
    kernel = pack_plan(problem, max(plans(problem), key=lambda plan: plan.warps * plan.blocks))
    binary = binary_of(kernel, problem.device.arch)
    assert (binary.spill_bytes, binary.stack_bytes) == (0, 0)
