"""Products that skip two of four columns, on the CPU against float64: every axis and epilogue, and what ptxas makes."""

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.cpu.block import execute_packed
from lospmm.families import all_fours, tensor_core, two_of_four
from lospmm.families.fours import FourColumns, choose_fours
from lospmm.families.two_of_four import TwoOfFour, micros, pack_plan, plans, refusal, registers_of, stages_of
from lospmm.matrix import readers
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import PLAIN, Epilogue, epilogue_of
from lospmm.problem.problem import Problem
from tests.families.matrices import matrices, pruned
from tests.families.products import binary_of, error_of
from tests.fixtures.covering import covering, each_value
from tests.fixtures.cubin_tools import cubin_tool
from tests.fixtures.real_layers import REAL_LAYERS, needs_real_layers

H200 = DEVICES["h200"]
BASE = TwoOfFour(groups=1, cols=64, blocks=1)


def problem_of(matrix: SparseMatrix, n: int, dtype: str = "float16", epilogue: Epilogue = PLAIN) -> Problem:
    return Problem(matrix, n, H200, epilogue=epilogue, dtype=DTYPES[dtype])


#: More chunks than the ring has stages, columns that come twice.
MATRIX = pruned(200, 800, 0.2, seed=1, empty_rows=0.1, dense_row=True)
PLANS = each_value(plans(problem_of(MATRIX, 136)))


@pytest.mark.parametrize(("plan", "dtype"), [(plan, "float16") for plan in PLANS] + [(PLANS[-1], "bfloat16")], ids=str)
def test_every_axis(plan: TwoOfFour, dtype: str) -> None:
    """Two blocks of the largest, ragged ones."""
    problem = problem_of(MATRIX, 136, dtype)
    assert error_of(problem, pack_plan(problem, plan)) < 1


@pytest.mark.parametrize(("relu", "residual", "bias"), covering(*3 * [[False, True]]))
def test_every_epilogue(relu: bool, residual: bool, bias: bool) -> None:
    matrix = pruned(70, 30, 0.2, seed=3, empty_rows=0.3, dense_row=True)
    epilogue = epilogue_of(np.linspace(-1, 1, 70) if bias else None, relu=relu, residual=residual)
    problem = problem_of(matrix, 24, epilogue=epilogue)
    assert error_of(problem, pack_plan(problem, BASE)) < 1


@pytest.mark.slow
@settings(max_examples=8)
@given(matrices(max_m=140, max_k=300), st.integers(1, 20), st.sampled_from(["float16", "bfloat16"]))
def test_any_matrix(matrix: SparseMatrix, eights: int, dtype: str) -> None:
    problem = problem_of(matrix, 8 * eights, dtype)
    assert error_of(problem, pack_plan(problem, BASE)) < 1


def test_rows_of_b_that_nothing_takes_are_not_copied() -> None:
    dense = np.zeros((64, 200), dtype=np.float32)
    dense[:, :70] = np.random.default_rng(4).normal(size=(64, 70))
    b = np.ones((200, 16), dtype=np.float32)
    b[70:] = np.nan
    kernel = pack_plan(problem_of(from_dense(dense), 16), BASE)
    assert np.isfinite(execute_packed(kernel, np.arange(16), b, m=64)).all()


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_what_is_not_finite_stays_in_its_column(bad: float) -> None:
    matrix = pruned(64, 40, 0.5, seed=5, dense_row=True)
    b = np.ones((40, 24), dtype=np.float32)
    b[7, 5] = bad
    c = execute_packed(pack_plan(problem_of(matrix, 24), BASE), np.arange(24), b, m=64)
    takes = matrix.to_scipy().toarray()[:, 7] != 0
    assert not np.isfinite(c[takes, 5]).any() and np.isfinite(np.delete(c, 5, axis=1)).all()


@pytest.mark.parametrize(("m", "k", "n"), [(768, 768, 4096), (64, 576, 50176), (1, 1, 24), (1024, 1024, 64)])
def test_plans_fit(m: int, k: int, n: int) -> None:
    problem = problem_of(pruned(m, k, 0.05, seed=7), n)
    found = plans(problem)
    assert found and len(set(found)) == len(found)
    for plan in found:
        launched, taken = registers_of(plan, problem)
        assert plan.blocks * plan.threads * launched <= H200.registers_per_sm
        assert taken >= launched and taken * plan.groups + 56 <= launched * (plan.groups + 1)
        assert 4 <= stages_of(plan, problem) <= 12 and micros(problem, plan) > 0
    kernel = pack_plan(problem, min(found, key=lambda plan: micros(problem, plan)))
    assert kernel.launch.shared_bytes <= H200.shared_bytes_per_block


@pytest.mark.slow
def test_every_plan_keeps_products_on_their_way(tmp_path: Path) -> None:
    """Nothing is spilled, no product waits for the one before, and warps hand registers over, which ptxas leaves out
    where a kernel is linked. Of tiles of one and three warpgroups, by the plan that has most beside it: a large
    cluster, or two blocks."""
    problem = problem_of(pruned(256, 512, 0.2, seed=8), 256)
    cubin = tmp_path / "kernel.cubin"
    largest = max(plan.cluster for plan in plans(problem))
    chosen = [plan for plan in plans(problem) if plan.cluster == 1 or (plan.cluster, plan.blocks) == (largest, 1)]
    of_tiles = {(plan.groups, plan.cols): plan for plan in chosen if plan.groups != 2}.values()
    assert len(of_tiles) > 6 and {plan.cluster for plan in of_tiles} == {1, largest}
    for plan in of_tiles:
        kernel = pack_plan(problem, plan)
        binary = binary_of(kernel)
        assert (binary.spill_bytes, binary.stack_bytes) == (0, 0), plan
        assert binary.registers == kernel.registers
        cubin.write_bytes(binary.cubin)
        text = subprocess.run([cubin_tool("nvdisasm"), cubin], capture_output=True, check=True).stdout.decode()
        # Two chunks a turn, of two steps each; a wait behind each, and one in the end.
        assert len(re.findall(r"HGMMA\.SP\.64x64x32", text)) == 4 * plan.cols // 64, plan
        assert len(re.findall(r"DEPBAR\.LE gsb0, 0x1", text)) == 2 and len(re.findall(r"gsb0, 0x0", text)) == 1, plan
        assert len(re.findall("USETMAXREG", text)) == 2, plan
        # Nobody waits until what a cluster stored to memory is there.
        assert len(re.findall("UCGABAR_WAIT", text)) == (plan.cluster > 1) and "MEMBAR.ALL.GPU" not in text, plan


def test_blocks_share_columns_of_a_where_all_run_at_a_time() -> None:
    few = {plan.cluster for plan in plans(problem_of(pruned(4096, 4096, 0.2, seed=8), 64))}
    assert few == {1, 2, 4}  # 22 blocks of 192 rows: 88, and 176 of clusters of 8, for 120 SMs
    assert {plan.cluster for plan in plans(problem_of(pruned(4096, 4096, 0.2, seed=8), 4096))} == {1}
    narrow = plans(problem_of(pruned(768, 200, 0.2, seed=8), 64))
    assert {plan.cluster for plan in narrow} == {1, 2}  # three chunks


def test_columns_are_ordered_once_for_threads_that_ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight plans of two heights of blocks."""
    problem = problem_of(pruned(192, 300, 0.4, seed=13), 320)
    chosen = [replace(BASE, groups=groups, cols=cols) for cols in two_of_four.COLS for groups in (1, 2)]
    asked: list[tuple[int, int]] = []

    def watched(matrix: SparseMatrix, first: int, rows: int, *, multiple: int) -> FourColumns:
        asked.append((first, rows))
        return choose_fours(matrix, first, rows, multiple=multiple)

    monkeypatch.setattr(all_fours, "choose_fours", watched)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda plan: pack_plan(problem, plan), chosen))
    assert sorted(asked) == [(0, 64), (0, 128), (64, 64), (128, 64), (128, 128)]


def test_parts_are_added_up_in_the_same_order() -> None:
    """The same bits whatever block comes first, and next to those of one block."""
    problem = problem_of(pruned(130, 700, 0.3, seed=12), 64)
    b = np.random.default_rng(12).normal(size=(700, 64)).astype(np.float32)
    alone, shared, again = (
        execute_packed(pack_plan(problem, replace(BASE, cluster=cluster)), np.arange(64), b, m=130)
        for cluster in (1, 4, 4)
    )
    assert (shared == again).all() and np.abs(shared - alone).max() < 0.05


@pytest.mark.parametrize(("n", "cluster"), [(24, 8), (40, 2), (88, 8)])
def test_blocks_of_a_cluster_with_all_some_or_none_of_their_columns(n: int, cluster: int) -> None:
    """And rows, of the second and third block of 64."""
    problem = problem_of(pruned(130, 700, 0.3, seed=12), n)
    b = np.random.default_rng(1).normal(size=(700, n)).astype(np.float16).astype(np.float32)
    found = execute_packed(pack_plan(problem, replace(BASE, cluster=cluster)), np.arange(n), b, m=130)
    exact = problem.matrix.to_scipy().toarray().astype(np.float16).astype(np.float64) @ b
    assert np.abs(found - exact).max() < 0.05


def test_what_there_is_no_kernel_for() -> None:
    matrix = pruned(8, 9, 0.5, seed=9)
    assert "multiple of 8" in str(refusal(problem_of(matrix, 100)))
    assert "n 16 is less than 24" in str(refusal(problem_of(matrix, 16)))
    assert "sm_80" in str(refusal(replace(problem_of(matrix, 72), device=DEVICES["a100"])))
    assert "sm_100" in str(refusal(replace(problem_of(matrix, 72), device=DEVICES["b200"])))
    assert refusal(problem_of(matrix, 72)) is None


def test_they_are_the_family_s_plans_of_16_bits() -> None:
    problem = problem_of(pruned(64, 90, 0.1, seed=10), 72)
    assert tensor_core.plans(problem) == two_of_four.plans(problem)
    kernel = tensor_core.pack_plan(problem, BASE)
    assert kernel.entry == "lospmm_two_of_four" and error_of(problem, kernel) < 1
    assert tensor_core.forecast(problem, [BASE])[0] == micros(problem, BASE)


@needs_real_layers
def test_real_layers() -> None:
    for path in sorted(REAL_LAYERS.rglob("*.npz"))[::9]:
        problem = problem_of(readers.read(path).matrix, 64)
        assert error_of(problem, pack_plan(problem, replace(BASE, groups=2))) < 1, path
