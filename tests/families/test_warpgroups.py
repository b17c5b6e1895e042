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

from lospmm import readers
from lospmm.convolution import Convolution
from lospmm.device import DEVICES
from lospmm.dtype import DTYPES
from lospmm.epilogue import PLAIN, Epilogue, epilogue_of
from lospmm.families import gathered_panels, tensor_core, warpgroups
from lospmm.families.warpgroups import (
    Warpgroups,
    micros,
    pack_plan,
    plans,
    refusal,
    registers_allowed,
    registers_needed,
    stages_of,
)
from lospmm.matrix import SparseMatrix, from_dense
from lospmm.model import Problem
from lospmm.packed import emission_of
from lospmm.runtime.block import execute_packed
from lospmm.settings import settings as lospmm_settings
from lospmm.sought import contenders
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.discover import find_toolkit
from tests.families.matrices import matrices, pruned
from tests.families.products import error_of

REAL = Path(__file__).parents[3] / "shared" / "data"
TIMED = Path(__file__).parents[2] / "benchmarks" / "results" / "tensor_core.jsonl"
H200 = DEVICES["h200"]
BOTH = pytest.mark.parametrize("dtype", ["tf32", "float32"])
BASE = Warpgroups(rows=64, groups=2, depth=16, blocks=1)

#: Each axis away from the others' usual value.
AXES = [
    *(replace(BASE, rows=rows) for rows in warpgroups.ROWS),
    *(replace(BASE, groups=groups) for groups in warpgroups.GROUPS),
    *(replace(BASE, depth=depth) for depth in warpgroups.DEPTHS),
    *(replace(BASE, blocks=blocks) for blocks in warpgroups.BLOCKS),
]


def problem_of(matrix: SparseMatrix, n: int, dtype: str, epilogue: Epilogue = PLAIN) -> Problem:
    return Problem(matrix, n, H200, epilogue=epilogue, dtype=DTYPES[dtype])


@pytest.mark.parametrize("plan", dict.fromkeys(AXES), ids=str)
@BOTH
def test_every_axis(plan: Warpgroups, dtype: str) -> None:
    """Two blocks of the largest, more chunks than the ring has stages, sums that are flushed more than once."""
    matrix = pruned(270, 300, 0.2, seed=1, empty_rows=0.1, dense_row=True)
    assert error_of(problem_of(matrix, 200, dtype), pack_plan(problem_of(matrix, 200, dtype), plan)) < 1


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@BOTH
def test_every_epilogue(dtype: str, relu: bool, residual: bool, bias: bool) -> None:
    matrix = pruned(70, 30, 0.2, seed=3, empty_rows=0.3, dense_row=True)
    epilogue = epilogue_of(np.linspace(-1, 1, 70) if bias else None, relu=relu, residual=residual)
    problem = problem_of(matrix, 20, dtype, epilogue)
    assert error_of(problem, pack_plan(problem, BASE)) < 1


@settings(max_examples=15)
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


@BOTH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_column(dtype: str, bad: float) -> None:
    matrix = pruned(64, 40, 0.5, seed=5, dense_row=True)
    b = np.ones((40, 24), dtype=np.float32)
    b[7, 5] = bad
    if np.isnan(bad):
        b[7, 5] = np.array(0x7FFFFFFF, dtype=np.uint32).view(np.float32)  # the NaN that GPUs make
    c = execute_packed(pack_plan(problem_of(matrix, 24, dtype), BASE), np.arange(24), b, m=64)
    takes = matrix.to_scipy().toarray()[:, 7] != 0
    assert not np.isfinite(c[takes, 5]).any() and np.isfinite(np.delete(c, 5, axis=1)).all()


@BOTH
@pytest.mark.parametrize(("m", "k", "n"), [(768, 768, 4096), (64, 576, 50176), (1, 1, 4), (4096, 4096, 1024)])
def test_plans_fit(dtype: str, m: int, k: int, n: int) -> None:
    problem = problem_of(pruned(m, k, 0.05, seed=7), n, dtype)
    found = plans(problem)
    assert found and len(set(found)) == len(found)
    for plan in found:
        threads = plan.blocks * plan.threads
        assert threads * registers_allowed(plan, problem) <= H200.registers_per_sm and threads <= H200.threads_per_sm
        assert 2 <= stages_of(plan, problem) <= 8 and micros(problem, plan) > 0
    kernel = pack_plan(problem, min(found, key=lambda plan: micros(problem, plan)))
    assert kernel.launch.shared_bytes <= H200.shared_bytes_per_block


@BOTH
def test_every_plan_keeps_products_on_their_way(tmp_path: Path, dtype: str) -> None:
    """Nothing is spilled, and no product waits for the one before: ptxas has them do so where registers are short. Of
    plans that leave it few."""
    problem = problem_of(pruned(2048, 64, 0.5, seed=8), 4096, dtype)
    store, cubin = Store(lospmm_settings().cache_dir), tmp_path / "kernel.cubin"
    slack = {plan: registers_allowed(plan, problem) - registers_needed(plan, problem.dtype) for plan in plans(problem)}
    tight = [plan for plan, registers in slack.items() if registers < 32]
    assert len(tight) >= 4
    for plan in tight:
        kernel = pack_plan(problem, plan)
        binary = compile_kernel(emission_of(kernel), arch="sm_90", registers=kernel.registers, store=store, workers=1)
        assert (binary.spill_bytes, binary.stack_bytes) == (0, 0), plan
        cubin.write_bytes(binary.cubin)
        text = subprocess.run([find_toolkit().nvdisasm, cubin], capture_output=True, check=True).stdout.decode()
        products, waits = (len(re.findall(word, text)) for word in ("HGMMA", r"DEPBAR\.LE gsb0, 0x0"))
        # One wait behind the last chunk, and one where sums of float32 are flushed.
        assert products >= 2 and waits == (1 if dtype == "tf32" else 2), plan


def test_the_forecast_is_near_what_was_timed() -> None:
    """Of all plans of `benchmarks.tensor_core`; and what it puts first is nearly the fastest."""
    lines = [json.loads(line) for line in TIMED.read_text().splitlines()]
    problems: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for line in lines:
        m, k, n = map(int, line["shape"].split("x"))
        if m == 512:
            problem = problem_of(pruned(m, k, 1 - line["sparsity"], seed=0), n, line["dtype"])
            assert micros(problem, Warpgroups(**line["plan"])) == pytest.approx(line["forecast"], rel=0.01)
        problems.setdefault((line["shape"], line["dtype"]), []).append((line["forecast"], line["micros"]))
    times = np.array([both for found in problems.values() for both in found])
    assert len(times) > 400 and np.std(np.log(times[:, 1] / times[:, 0])) < 0.15
    slower = [min(found)[1] / min(time for _, time in found) for found in problems.values()]
    assert max(slower) < 1.2 and np.mean(slower) < 1.04


def test_what_there_is_no_kernel_for() -> None:
    matrix = pruned(8, 9, 0.5, seed=9)
    assert "float16" in str(refusal(problem_of(matrix, 8, "float16")))
    assert "multiple of 4" in str(refusal(problem_of(matrix, 6, "tf32")))
    assert "sm_80" in str(refusal(replace(problem_of(matrix, 8, "tf32"), device=DEVICES["a100"])))
    assert "sm_100" in str(refusal(replace(problem_of(matrix, 8, "tf32"), device=DEVICES["b200"])))
    assert refusal(problem_of(matrix, 8, "tf32")) is None
    convolution = Convolution(batch=1, channels=1, height=4, width=4, kernel_height=3, kernel_width=3)
    assert tensor_core.refusal(Problem(matrix, convolution.n, H200, convolution)) == "a convolution"


@pytest.mark.parametrize(("n", "dtype"), [(8, "float16"), (6, "tf32")])
def test_elsewhere_tensor_cores_take_panels(n: int, dtype: str) -> None:
    problem = problem_of(pruned(64, 90, 0.1, seed=10), n, dtype)
    found = tensor_core.plans(problem)
    assert found == gathered_panels.plans(problem) and found
    kernel = tensor_core.pack_plan(problem, found[0])
    assert kernel.entry == "lospmm_gathered_panels" and error_of(problem, kernel) < 1
    assert tensor_core.forecast(problem, found[:1])[0] == gathered_panels.micros(problem, found[0])


def test_warpgroups_take_part_beside_the_unrolled_kernel() -> None:
    matrix = pruned(64, 90, 0.1, seed=11)
    names = ("unrolled", "csr", "tensor_core", "dense")
    for n, dtype, there in ((8, "float32", True), (8, "tf32", True), (6, "tf32", False), (6, "float16", True)):
        found = contenders(names, problem_of(matrix, n, dtype), is_unrolled=True)
        assert ("tensor_core" in found) == there, (n, dtype)
    assert "tensor_core" in contenders(names, problem_of(matrix, 6, "tf32"), is_unrolled=False)


@pytest.mark.skipif(not REAL.is_dir(), reason="no pruned layers beside the repository, in ../shared/data")
def test_real_layers() -> None:
    for path in sorted(REAL.rglob("*.npz"))[::9]:
        problem = problem_of(readers.read(path).matrix, 64, "float32")
        assert error_of(problem, pack_plan(problem, replace(BASE, groups=1, rows=128))) < 1, path
