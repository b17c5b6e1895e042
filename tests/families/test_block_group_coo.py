"""BlockGroupCOO: every plan computes A x B, its data hold A, and a matrix without blocks is refused with the figure."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lospmm.families import FAMILIES
from lospmm.families.block_group_coo import (
    COLUMNS,
    GROUPS,
    TEAMS,
    BlockGroupCooPlan,
    forecast,
    lanes_of,
    pack_plan,
    plans,
    refusal,
)
from lospmm.families.blocks import SIDES, blocks_of, dense_blocks, fills, lengths_of_block_rows
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.device import find_device
from lospmm.problem.dtype import DTYPES, Dtype
from lospmm.problem.epilogue import PLAIN, Epilogue
from lospmm.problem.problem import Problem
from tests.families.grouped import DEVICE, check, compiled, matrices, problems
from tests.families.products import binary_of


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(problems(blocks=8), st.data())
def test_every_plan_multiplies(problem: Problem, data: st.DataObject) -> None:
    every = plans(problem)
    assert (refusal(problem) is None) == bool(every)
    assume(every)
    check(problem, pack_plan(problem, data.draw(st.sampled_from(every))))


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    problems(blocks=8),
    st.sampled_from(SIDES),
    st.sampled_from(SIDES),
    st.sampled_from(GROUPS),
    st.sampled_from(COLUMNS),
    st.sampled_from(TEAMS),
)
def test_any_sizes_multiply(
    problem: Problem, rows: int, depth: int, group: int, columns: int, team: tuple[int, int]
) -> None:
    """Also those that no plan would take: half empty blocks, ragged ends."""
    group = max(group, 16 // depth)
    check(problem, pack_plan(problem, BlockGroupCooPlan(rows, depth, group, columns, *team, 1)))


@settings(deadline=None)
@given(matrices(blocks=4), st.sampled_from(SIDES), st.sampled_from(SIDES))
def test_blocks_cover_the_matrix(matrix: SparseMatrix, rows: int, cols: int) -> None:
    blocks = blocks_of(matrix, rows, cols)
    dense = dense_blocks(matrix, matrix.data, blocks, rows, cols)
    whole = np.zeros((len(blocks.indptr) * rows, matrix.k + cols), np.float32)
    for block_row in range(len(blocks.indptr) - 1):
        for at in range(blocks.indptr[block_row], blocks.indptr[block_row + 1]):
            column = blocks.columns[at] * cols
            whole[block_row * rows : (block_row + 1) * rows, column : column + cols][:, : whole.shape[1] - column] += (
                dense[at][:, : whole.shape[1] - column]
            )
    assert np.array_equal(whole[: matrix.m, : matrix.k], matrix.to_scipy().toarray())
    assert not whole[matrix.m :].any() and not whole[:, matrix.k :].any()
    lengths = lengths_of_block_rows(matrix)
    assert np.array_equal(lengths[rows, cols], np.diff(blocks.indptr))
    assert fills(matrix, lengths)[rows, cols] == pytest.approx(matrix.nnz / max(1, dense.size))


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
@pytest.mark.parametrize(("rows", "depth", "length"), [(8, 8, 2), (16, 16, 1), (64, 32, 2)])
def test_lanes_hold_every_element(dtype: Dtype, rows: int, depth: int, length: int) -> None:
    """Undone, step by step of the description, the data are A."""
    taken = dtype.rounded(np.random.default_rng(0).standard_normal((3, length, rows, depth)).astype(np.float32))
    data = lanes_of(taken, dtype)
    inner = 16 if dtype.element_bytes == 2 else 8
    whole = np.empty((3, rows, length * depth), np.float32)
    kind = {"float16": np.float16, "bfloat16": np.uint16}.get(dtype.name, np.float32)
    words = data.reshape(-1).view(kind)
    own, parts = inner // 4, rows // 8
    together = 1 if dtype.name == "float32" or parts % 2 else 2
    at = 0
    for group in range(3):
        for step in range(length * depth // inner):
            for pair in range(parts // together):
                for lane in range(32):
                    for half in range(together):
                        row = (pair * together + half) * 8 + lane // 4
                        first = step * inner + lane % 4 * own
                        found = dtype.from_storage(words[at : at + own])
                        if dtype.name == "float32":
                            found = found + words[at + own : at + 2 * own]
                            at += own
                        whole[group, row, first : first + own] = found
                        at += own
    assert at == len(words)
    expected = taken.transpose(0, 2, 1, 3).reshape(whole.shape)
    assert np.allclose(whole, expected, rtol=2.0**-21 if dtype.name == "float32" else 0, atol=0)


def test_lone_blocks_of_8_have_a_plan() -> None:
    """A step of 16-bit elements takes two of them: one is padding, however much that is."""
    weights = np.zeros((4, 36), np.float32)
    weights[:, 32:] = 1
    problem = Problem(from_dense(weights), 16, DEVICE, None, PLAIN, DTYPES["float16"])
    assert refusal(problem) is None and {plan.group for plan in plans(problem)} == {2}
    check(problem, pack_plan(problem, plans(problem)[0]))


def test_refusals_say_why() -> None:
    random = np.random.default_rng(0)
    scattered = from_dense((random.random((256, 256)) < 0.05).astype(np.float32))
    problem = Problem(scattered, 64, DEVICE)
    assert "not block-sparse: blocks of 8 x 8 to 64 x 64 are at most 5." in (refusal(problem) or "")
    assert plans(problem) == []
    full = Problem(from_dense(np.ones((64, 64), np.float32)), 64, DEVICE)
    assert refusal(full) is None
    for weight in (1e-37, 3.4028e38):
        extreme = replace(full, matrix=from_dense(np.full((64, 64), weight, np.float32)))
        assert (refusal(extreme) or "").endswith("cannot be split into two TF32 numbers")
    small = replace(full, matrix=from_dense(np.full((64, 64), 1e-37, np.float32)), dtype=DTYPES["tf32"])
    assert refusal(small) is None
    old = replace(full, device=find_device("rtx2080ti"))
    assert refusal(old) == "sm_75 has no tensor cores for float32"


@settings(deadline=None, max_examples=50)
@given(problems(blocks=8))
def test_plans_have_forecasts(problem: Problem) -> None:
    every = plans(problem)
    found = forecast(problem, every)
    assert found.shape == (len(every),) and (found > 0).all()
    for plan in every:
        assert problem.n % plan.vector == 0 and plan.columns % plan.vector == 0 and plan.warps % plan.splits == 0


@pytest.mark.slow
@compiled
def test_templates_compile_without_spills(arch: str, dtype: Dtype) -> None:
    matrix = from_dense(np.ones((64, 64), np.float32))
    vector = 16 // dtype.element_bytes
    for epilogue, plan in (
        (PLAIN, BlockGroupCooPlan(64, 64, 1, 8 if dtype.name != "float32" else 4, 4, 1, min(vector, 8))),
        (Epilogue((0.5,) * 64, True, True), BlockGroupCooPlan(32, 32, 2, 8, 8, 4, vector)),
        (PLAIN, BlockGroupCooPlan(8, 8, 4, 2, 4, 4, 1)),
        (PLAIN, BlockGroupCooPlan(16, 16, 4, 4, 8, 1, min(4, vector))),
    ):
        kernel = pack_plan(Problem(matrix, 256, DEVICE, None, epilogue, dtype), plan)
        binary = binary_of(kernel, arch)
        assert binary.spill_bytes == 0 and binary.stack_bytes == 0, plan


def test_it_is_a_family() -> None:
    assert FAMILIES["block_group_coo"].plans is plans
