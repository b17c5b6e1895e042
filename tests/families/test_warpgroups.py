"""Products of warpgroups on the CPU, against float64: every axis, every epilogue, and what ptxas makes of them."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fitting import DATA
from lospmm.cpu.block import execute_packed
from lospmm.families.warpgroups import (
    KINDS,
    Warpgroups,
    micros,
    pack_plan,
    plans,
    refusal,
    registers_allowed,
    registers_needed,
    rows_at_once,
    stages_of,
    threads_of,
)
from lospmm.matrix import readers
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import PLAIN, Epilogue, epilogue_of
from lospmm.problem.problem import Problem
from tests.families.forecasts import against_times
from tests.families.matrices import matrices, pruned
from tests.families.products import binary_of, error_of
from tests.fixtures.covering import covering, each_value
from tests.fixtures.cubin_tools import cubin_tool
from tests.fixtures.real_layers import REAL_LAYERS, needs_real_layers

TIMED = DATA / "tensor_core.jsonl"
H200 = DEVICES["h200"]
BOTH = pytest.mark.parametrize("dtype", ["tf32", "float32"])
BASE = Warpgroups(rows=64, groups=1, depth=32, blocks=1)


def problem_of(matrix: SparseMatrix, n: int, dtype: str, epilogue: Epilogue = PLAIN) -> Problem:
    return Problem(matrix, n, H200, epilogue=epilogue, dtype=DTYPES[dtype])


#: More chunks than the ring has stages, an odd number of them, several sums.
MATRIX = pruned(270, 300, 0.2, seed=1, empty_rows=0.1, dense_row=True)
PLANS = [(dtype, plan) for dtype in KINDS for plan in each_value(plans(problem_of(MATRIX, 200, dtype)))]


@pytest.mark.parametrize(("dtype", "plan"), PLANS, ids=str)
def test_every_axis(dtype: str, plan: Warpgroups) -> None:
    """Two blocks of the largest."""
    problem = problem_of(MATRIX, 200, dtype)
    assert error_of(problem, pack_plan(problem, plan)) < 1


@pytest.mark.parametrize(("relu", "residual", "bias", "dtype"), covering(*3 * [[False, True]], ["tf32", "float32"]))
def test_every_epilogue(relu: bool, residual: bool, bias: bool, dtype: str) -> None:
    matrix = pruned(70, 30, 0.2, seed=3, empty_rows=0.3, dense_row=True)
    epilogue = epilogue_of(np.linspace(-1, 1, 70) if bias else None, relu=relu, residual=residual)
    problem = problem_of(matrix, 20, dtype, epilogue)
    assert error_of(problem, pack_plan(problem, BASE)) < 1


@pytest.mark.slow
@settings(max_examples=8)
@given(matrices(max_m=140, max_k=90), st.integers(1, 40), st.sampled_from(["tf32", "float32"]))
def test_any_matrix(matrix: SparseMatrix, fours: int, dtype: str) -> None:
    problem = problem_of(matrix, 4 * fours, dtype)
    assert error_of(problem, pack_plan(problem, BASE)) < 1


@BOTH
def test_columns_without_a_nonzero_are_not_copied(dtype: str) -> None:
    """Each block has its own: what B has in rows that no row of A takes is not looked at."""
    dense = np.zeros((200, 400), dtype=np.float32)
    rng = np.random.default_rng(4)
    dense[:64, rng.permutation(200)[:60]] = rng.normal(size=(64, 60))
    dense[128:, 200 + rng.permutation(200)[:30]] = rng.normal(size=(72, 30))  # none in the second block
    problem = problem_of(from_dense(dense), 36, dtype)
    kernel = pack_plan(problem, BASE)
    assert "#define LISTED 1\n" in kernel.source
    assert error_of(problem, kernel) < 1
    b = rng.normal(size=(400, 36)).astype(np.float32)
    b[~dense.any(axis=0)] = np.nan
    assert np.isfinite(execute_packed(kernel, np.arange(36), b, m=200)).all()


@pytest.mark.parametrize(("dtype", "bad"), [("tf32", -np.inf), ("float32", np.nan)])
def test_what_is_not_finite_stays_in_its_column(dtype: str, bad: float) -> None:
    matrix = pruned(64, 40, 0.5, seed=5, dense_row=True)
    b = np.ones((40, 24), dtype=np.float32)
    b[7, 5] = bad
    if np.isnan(bad):
        b[7, 5] = np.array(0x7FFFFFFF, dtype=np.uint32).view(np.float32)  # the NaN that GPUs make
    c = execute_packed(pack_plan(problem_of(matrix, 24, dtype), BASE), np.arange(24), b, m=64)
    takes = matrix.to_scipy().toarray()[:, 7] != 0
    assert not np.isfinite(c[takes, 5]).any() and np.isfinite(np.delete(c, 5, axis=1)).all()


def bound_of(matrix: SparseMatrix, b: NDArray[np.float32]) -> NDArray[np.float64]:
    """What is said of float32 (docs/accuracy.md): an element of B is kept to 2^-22 of itself or 2^-35 of the largest of
    its column among 64, a weight to 2^-22 of itself or 2^-39 of the largest of its row; the product of two rests is
    left out; and sums are float32."""
    a, exact = abs(matrix.to_scipy().toarray().astype(np.float64)), abs(b.astype(np.float64))
    chunks = [exact[first : first + 64] for first in range(0, len(exact), 64)]
    largest = np.concatenate([np.broadcast_to(chunk.max(axis=0), chunk.shape) for chunk in chunks])
    of_b = np.maximum(2.0**-22 * exact, 2.0**-35 * largest)
    of_a = np.where(a > 0, np.maximum(2.0**-22 * a, 2.0**-39 * a.max(axis=1, keepdims=True)), 0)
    rests, rounded = 2.0**-22 * (a @ exact), 2.0**-21 * (a @ exact)
    return np.asarray(a @ of_b + of_a @ exact + rests + rounded + 2.0**-126)


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 3, 12, 40]), st.sampled_from([0, 10, 30]), st.booleans())
def test_float32_of_any_size(seed: int, spread: int, of_weights: int, steps: bool) -> None:
    """Elements of B up to 2^spread apart within a column, chunks too, and columns and rows of A of any size."""
    rng = np.random.default_rng(seed)
    matrix = pruned(40, 150, 0.3, seed=seed % 97)
    rows = 2.0 ** rng.integers(-of_weights, of_weights + 1, size=40)
    matrix = from_dense((matrix.to_scipy().toarray() * rows[:, np.newaxis]).astype(np.float32))
    powers = rng.uniform(-spread, 0, size=(150, 12))
    if steps:
        powers += rng.integers(-spread, spread + 1, size=(5, 12)).repeat(32, axis=0)[:150]
    b = (rng.choice([-1, 1], size=powers.shape) * 2.0 ** (powers + rng.integers(-20, 21, size=12))).astype(np.float32)
    b[rng.random(b.shape) < 0.1] = 0
    b[:64, 5] = 0
    c = execute_packed(pack_plan(problem_of(matrix, 12, "float32"), BASE), np.arange(12), b, m=40)
    exact = matrix.to_scipy().toarray().astype(np.float64) @ b.astype(np.float64)
    assert (abs(c - exact) <= bound_of(matrix, b)).all()


def test_what_is_small_beside_another_loses_bits_and_no_more() -> None:
    """The bound is not met by accident: of what is 2^-30 of its column's largest five bits are kept."""
    problem = problem_of(from_dense(np.eye(64, dtype=np.float32)), 4, "float32")
    b = np.zeros((64, 4), dtype=np.float32)
    b[0], b[20] = np.float32(1 + 2**-9) * np.float32(2) ** -30, 1
    c = execute_packed(pack_plan(problem, BASE), np.arange(4), b, m=64)
    assert (abs(c[0] / b[0] - 1) > 2.0**-12).all() and (abs(c[0] - b[0]) <= 2.0**-35).all()
    b[20] = 0
    assert np.array_equal(execute_packed(pack_plan(problem, BASE), np.arange(4), b, m=64)[0], b[0])


@BOTH
@pytest.mark.parametrize(("m", "k", "n"), [(768, 768, 4096), (64, 576, 50176), (1, 1, 4), (1024, 1024, 1024)])
def test_plans_fit(dtype: str, m: int, k: int, n: int) -> None:
    problem = problem_of(pruned(m, k, 0.05, seed=7), n, dtype)
    found = plans(problem)
    assert found and len(set(found)) == len(found)
    for plan in found:
        threads = plan.blocks * threads_of(plan, problem)
        assert threads * registers_allowed(plan, problem) <= H200.registers_per_sm and threads <= H200.threads_per_sm
        assert 2 <= stages_of(plan, problem) <= 8 and micros(problem, plan) > 0
        assert plan.rows % rows_at_once(plan, problem) == 0
    kernel = pack_plan(problem, min(found, key=lambda plan: micros(problem, plan)))
    assert kernel.launch.shared_bytes <= H200.shared_bytes_per_block


@pytest.mark.slow
@BOTH
def test_every_plan_keeps_products_on_their_way(tmp_path: Path, dtype: str) -> None:
    """Nothing is spilled, and no product waits for the one before: ptxas has them do so where registers are short. Of
    plans that leave it few, the deepest of each tile."""
    problem = problem_of(pruned(2048, 64, 0.5, seed=8), 4096, dtype)
    cubin = tmp_path / "kernel.cubin"
    tight = [plan for plan in plans(problem) if _slack(plan, problem) < (32 if dtype == "tf32" else 16)]
    of_tiles = {(plan.rows, plan.groups): plan for plan in tight}.values()
    assert len(of_tiles) >= 4
    for plan in of_tiles:
        kernel = pack_plan(problem, plan)
        binary = binary_of(kernel)
        assert (binary.spill_bytes, binary.stack_bytes) == (0, 0), plan
        cubin.write_bytes(binary.cubin)
        text = subprocess.run([cubin_tool("nvdisasm"), cubin], capture_output=True, check=True).stdout.decode()
        products, all_waits, waits = (
            len(re.findall(word, text)) for word in ("HGMMA", r"DEPBAR\.LE gsb0", r"DEPBAR\.LE gsb0, 0x0")
        )
        if dtype == "tf32":  # one wait behind the last chunk
            assert products >= 2 and waits == 1, plan
            continue
        # Two chunks a turn. Sums of two products or one wait for the second of two chunks of 32 columns.
        parts, steps = plan.rows // rows_at_once(plan, problem), plan.depth // 16
        is_shared = plan.depth == 32 and parts == 2
        assert products == 2 * parts * steps * 3 and all_waits == (3 if is_shared else 2 * parts), plan


def _slack(plan: Warpgroups, problem: Problem) -> int:
    needed = registers_needed(plan, problem, rows_at_once(plan, problem))
    return registers_allowed(plan, problem) - needed


def test_the_forecast_is_near_what_was_timed() -> None:
    """Of all plans of `fitting.tensor_core`; and what it puts first is nearly the fastest."""
    lines = [json.loads(line) for line in TIMED.read_text().splitlines()]
    for line in lines:
        m, k, n = map(int, line["shape"].split("x"))
        if m == 512:
            problem = problem_of(pruned(m, k, 1 - line["sparsity"], seed=0), n, line["dtype"])
            assert micros(problem, Warpgroups(**line["plan"])) == pytest.approx(line["forecast"], rel=0.01)
    missed, slower = against_times(lines)
    assert len(missed) > 500 and np.std(missed) < 0.15
    assert max(slower) < 1.2 and np.mean(slower) < 1.04


def test_what_there_is_no_kernel_for() -> None:
    matrix = pruned(8, 9, 0.5, seed=9)
    assert "multiple of 4" in str(refusal(problem_of(matrix, 6, "tf32")))
    assert "sm_80" in str(refusal(replace(problem_of(matrix, 8, "tf32"), device=DEVICES["a100"])))
    assert "sm_100" in str(refusal(replace(problem_of(matrix, 8, "tf32"), device=DEVICES["b200"])))
    assert refusal(problem_of(matrix, 8, "tf32")) is None


@needs_real_layers
def test_real_layers() -> None:
    for path in sorted(REAL_LAYERS.rglob("*.npz"))[::9]:
        problem = problem_of(readers.read(path).matrix, 64, "float32")
        assert error_of(problem, pack_plan(problem, replace(BASE, groups=1, rows=128))) < 1, path
