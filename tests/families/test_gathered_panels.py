"""Panels of tensor_core on the CPU, against float64: every axis of their plans, every type, every epilogue."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.cpu.block import execute_packed
from lospmm.families import gathered_panels
from lospmm.families.gathered_panels import GatheredPanelsPlan, fits, micros, pack_plan, plans, refusal
from lospmm.families.panels import numbered_rows
from lospmm.matrix import readers
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES, Dtype
from lospmm.problem.epilogue import PLAIN, Epilogue, epilogue_of
from lospmm.problem.problem import Problem
from lospmm.settings import settings as lospmm_settings
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.template import emission_of
from tests.families.matrices import pruned
from tests.fixtures.real_layers import REAL_LAYERS, needs_real_layers

H200 = DEVICES["h200"]


def problem_of(matrix: SparseMatrix, n: int, dtype: str, epilogue: Epilogue = PLAIN) -> Problem:
    return Problem(matrix, n, H200, epilogue=epilogue, dtype=DTYPES[dtype])


def worst_error(problem: Problem, plan: GatheredPanelsPlan, *, seed: int = 0) -> float:
    """Of C against float64, in units of what the type allows: 1 is its rounding of C and the sums' in float32."""
    matrix, dtype, epilogue = problem.matrix, problem.dtype, problem.epilogue
    rng = np.random.default_rng(seed)
    b = rng.standard_normal((matrix.k, problem.n), dtype=np.float32)
    residual = rng.standard_normal((matrix.m, problem.n), dtype=np.float32) if epilogue.residual else None
    c = execute_packed(pack_plan(problem, plan), np.arange(problem.n), b, m=matrix.m, residual=residual)
    a = dtype.rounded(matrix.to_scipy().toarray()).astype(np.float64)
    b64 = dtype.rounded(b).astype(np.float64)
    truth, bound = a @ b64, np.abs(a) @ np.abs(b64)
    if residual is not None:
        stored = dtype.from_storage(dtype.to_storage(residual))
        truth, bound = truth + stored, bound + np.abs(stored)
    if epilogue.bias is not None:
        bias = np.array(epilogue.bias)[:, np.newaxis]
        truth, bound = truth + bias, bound + np.abs(bias)
    if epilogue.relu:
        truth = np.maximum(truth, 0)
    allowed = bound * 2.0**-20 + np.abs(truth) * _roundoff_of_storage(dtype) + 1e-7
    return float((np.abs(c - truth) / allowed).max())


def _roundoff_of_storage(dtype: Dtype) -> float:
    return dtype.unit_roundoff if dtype.element_bytes == 2 else 2.0**-24


BASE = GatheredPanelsPlan(subgroups=2, warps=4, parts=1, cols=32, slabs=2, stages=2)

#: Each axis away from the others' usual value.
AXES = [
    *(replace(BASE, subgroups=subgroups) for subgroups in gathered_panels.SUBGROUPS),
    *(replace(BASE, warps=warps) for warps in gathered_panels.WARPS),
    *(replace(BASE, parts=parts) for parts in gathered_panels.PARTS),
    *(replace(BASE, cols=cols) for cols in gathered_panels.COLS),
    replace(BASE, slabs=1, stages=1),
    replace(BASE, slabs=5, stages=2),
    replace(BASE, slabs=5, stages=3),
    replace(BASE, ahead=3),
    replace(BASE, ahead=4),
]


@pytest.mark.parametrize("plan", AXES, ids=str)
@pytest.mark.parametrize("dtype", ["tf32", "float16"])
def test_every_axis(plan: GatheredPanelsPlan, dtype: str) -> None:
    matrix = pruned(75, 90, 0.15, seed=1, empty_rows=0.1, dense_row=True)
    assert worst_error(problem_of(matrix, 72, dtype), plan) < 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 12, 33, 40, 100])
def test_every_type_and_any_n(dtype: str, n: int) -> None:
    matrix = pruned(40, 50, 0.2, seed=2, dense_row=True)
    assert worst_error(problem_of(matrix, n, dtype), replace(BASE, parts=2)) < 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_every_epilogue(dtype: str, relu: bool, residual: bool, bias: bool) -> None:
    matrix = pruned(21, 30, 0.2, seed=3, empty_rows=0.3, dense_row=True)
    epilogue = epilogue_of(np.linspace(-1, 1, 21) if bias else None, relu=relu, residual=residual)
    assert worst_error(problem_of(matrix, 20, dtype, epilogue), BASE) < 1


@settings(max_examples=15)
@given(
    st.integers(1, 80),
    st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    st.sampled_from([0.0, 0.6]),
    st.integers(0, 99),
    st.sampled_from(["float16", "float32"]),
)
def test_any_matrix(m: int, density: float, empty_rows: float, seed: int, dtype: str) -> None:
    matrix = pruned(m, 40, density, seed=seed, empty_rows=empty_rows, dense_row=True)
    assert worst_error(problem_of(matrix, 40, dtype), replace(BASE, slabs=3), seed=seed) < 1


@pytest.mark.parametrize(("m", "k", "density"), [(1, 1, 1.0), (1, 60, 0.1), (60, 1, 0.5), (9, 5, 0.0), (64, 64, 1.0)])
def test_small_and_odd_matrices(m: int, k: int, density: float) -> None:
    assert worst_error(problem_of(pruned(m, k, density, seed=4), 24, "float16"), BASE) < 1


def test_float32_is_as_exact_as_float32() -> None:
    """Long rows: three products of TF32 numbers lose no more than sums in float32 do."""
    matrix = pruned(16, 700, 1.0, seed=5)
    problem = problem_of(matrix, 16, "float32")
    b = np.random.default_rng(0).standard_normal((700, 16), dtype=np.float32)
    c = execute_packed(pack_plan(problem, replace(BASE, slabs=4)), np.arange(16), b, m=16)
    a = matrix.to_scipy().toarray().astype(np.float64)
    assert (np.abs(c - a @ b) / (np.abs(a) @ np.abs(b))).max() < 1e-6


def test_what_is_not_a_number_stays_in_its_column() -> None:
    """Zeros of a fragment are multiplied too, so a row of C may show what only another row of its panel takes."""
    problem = problem_of(pruned(16, 30, 0.3, seed=6, dense_row=True), 40, "tf32")
    b = np.ones((30, 40), np.float32)
    b[7, 5] = np.nan
    c = execute_packed(pack_plan(problem, BASE), np.arange(40), b, m=16)
    takes = problem.matrix.to_scipy().toarray()[:, 7] != 0
    assert np.isnan(c[takes, 5]).all() and not np.isnan(np.delete(c, 5, axis=1)).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(768, 768, 4096), (64, 576, 50176), (1, 1, 1), (8, 5000, 16)])
def test_plans_fit(dtype: str, m: int, k: int, n: int) -> None:
    problem = problem_of(pruned(m, k, 0.05, seed=7), n, dtype)
    found = plans(problem)
    assert found and len(set(found)) == len(found)
    assert all(fits(plan, problem) for plan in found)
    columns = numbered_rows(problem.matrix)[0]
    assert all(
        gathered_panels.shared_bytes(plan, columns, problem.dtype) <= H200.shared_bytes_per_block for plan in found
    )
    forecasts = np.array([micros(problem, plan) for plan in found])
    assert (forecasts > 0).all() and np.isfinite(forecasts).all()


def test_a_denser_matrix_is_forecast_to_take_longer() -> None:
    plan = replace(BASE, subgroups=4, cols=64)
    thin, dense = (problem_of(pruned(512, 512, density, seed=8), 4096, "float16") for density in (0.02, 0.3))
    assert micros(thin, plan) < micros(dense, plan)


def test_what_it_has_no_kernel_for() -> None:
    matrix = pruned(4, 9, 0.5, seed=9)
    assert "sm_75" in str(refusal(Problem(matrix, 8, DEVICES["rtx2080ti"])))
    assert refusal(Problem(matrix, 8, DEVICES["a100"])) is None


#: The most registers that a plan of each type is forecast to need, for each number of warps, and a ring.
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["float32", "tf32", "float16"])
def test_the_tightest_plans_do_not_spill(arch: str, dtype: str) -> None:
    problem = problem_of(pruned(2048, 700, 0.05, seed=10), 4096, dtype)
    rings = [plan for plan in plans(problem) if plan.stages < plan.slabs]
    for warps in {plan.warps for plan in rings}:
        of_warps = [plan for plan in rings if plan.warps == warps]
        plan = max(of_warps, key=lambda plan: gathered_panels.registers_needed(plan, problem.dtype))
        kernel = pack_plan(problem, plan)
        binary = compile_kernel(
            emission_of(kernel),
            arch=arch,
            registers=kernel.registers,
            store=Store(lospmm_settings().cache_dir),
            workers=1,
        )
        assert (binary.spill_bytes, binary.stack_bytes) == (0, 0), plan


@needs_real_layers
def test_real_layers() -> None:
    for path in sorted(REAL_LAYERS.rglob("*.npz"))[::4]:
        matrix = readers.read(path).matrix
        problem = problem_of(matrix, 16, "float16")
        assert worst_error(problem, GatheredPanelsPlan(4, 8, 2, 16, 3, 2)) < 1, path
