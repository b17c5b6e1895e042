"""GroupCOO: every plan computes A x B, and its groups hold A."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.families import FAMILIES
from lospmm.families.group_coo import GROUPS, SHARES, WARPS, GroupCooPlan, forecast, pack_plan, plans, refusal
from lospmm.families.groups import make_groups, team_starts
from lospmm.matrix import readers
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import PLAIN, Epilogue
from lospmm.problem.problem import Problem
from tests.families.grouped import DEVICE, check, compiled, matrices, problems, real_files
from tests.families.products import binary_of
from tests.fixtures.real_layers import needs_real_layers


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(problems(), st.data())
def test_every_plan_multiplies(problem: Problem, data: st.DataObject) -> None:
    every = plans(problem)
    assert refusal(problem) is None
    check(problem, pack_plan(problem, data.draw(st.sampled_from(every))))


@pytest.mark.parametrize(("group", "dtype"), list(zip(GROUPS, itertools.cycle(DTYPES.values()), strict=False)), ids=str)
def test_a_row_is_shared_by_teams(group: int, dtype: object) -> None:
    """One row of 1,000 entries beside short and empty ones: it is a block's own, and crosses its teams."""
    random = np.random.default_rng(group)
    weights = np.where(random.random((40, 1000)) < 0.01, random.standard_normal((40, 1000)), 0).astype(np.float32)
    weights[7], weights[3] = random.standard_normal(1000), 0
    problem = Problem(from_dense(weights), 32, DEVICE, None, Epilogue(relu=True), dtype)  # type: ignore[arg-type]
    check(problem, pack_plan(problem, GroupCooPlan(group, 4, 8 // 2 if dtype.element_bytes == 4 else 8, 4, 4)))  # type: ignore[attr-defined]


@settings(deadline=None)
@given(matrices(), st.sampled_from(GROUPS), st.integers(1, 100))
def test_groups_hold_every_entry_once(matrix: SparseMatrix, length: int, room: int) -> None:
    groups = make_groups(matrix.indptr, length, room)
    is_there = groups.places >= 0
    assert np.array_equal(np.sort(groups.places[is_there]), np.arange(matrix.nnz))
    rows = np.repeat(groups.rows[:, np.newaxis], length, axis=1)[is_there]
    assert np.array_equal(rows, matrix.rows_of_nonzeros()[groups.places[is_there]])
    assert is_there[:, 0].all(), "no group is empty"
    assert np.array_equal(np.sort(np.concatenate((np.unique(groups.rows), groups.empty_rows))), np.arange(matrix.m))
    # Blocks are whole rows that fit, or one row.
    assert groups.blocks[0] == 0 and groups.blocks[-1] == len(groups.rows)
    for begin, end in zip(groups.blocks[:-1], groups.blocks[1:], strict=True):
        own = set(groups.rows[begin:end].tolist())
        assert end > begin and (end - begin <= room or len(own) == 1)
        assert own.isdisjoint(groups.rows[:begin].tolist()) and own.isdisjoint(groups.rows[end:].tolist())
        changes = np.count_nonzero(np.diff(groups.rows[begin:end]))
        assert changes == len(own) - 1, "the groups of a row are adjacent"


@settings(deadline=None)
@given(matrices(), st.sampled_from(GROUPS), st.integers(1, 100), st.sampled_from([1, 4, 32]))
def test_teams_share_out_a_block(matrix: SparseMatrix, length: int, room: int, teams: int) -> None:
    groups = make_groups(matrix.indptr, length, room)
    starts = team_starts(groups, teams)
    assert np.array_equal(starts[::teams], groups.blocks) and (np.diff(starts) >= 0).all()
    even = -(-np.diff(groups.blocks) // teams)
    assert (np.diff(starts).reshape(-1, teams) <= 2 * even[:, np.newaxis]).all()


@settings(deadline=None, max_examples=40)
@given(problems())
def test_plans_are_few_and_have_forecasts(problem: Problem) -> None:
    every = plans(problem)
    assert 0 < len(every) <= len(GROUPS) * 4 * len(WARPS) * len(SHARES)
    found = forecast(problem, every)
    assert found.shape == (len(every),) and (found > 0).all() and np.isfinite(found).all()
    for plan in every:
        assert problem.n % plan.vector == 0 and plan.teams * plan.lanes == plan.warps * 32
        assert plan.vector * problem.dtype.element_bytes <= 16


@needs_real_layers
def test_real_layers() -> None:
    for path in real_files():
        matrix = readers.read(path).matrix
        problem = Problem(matrix, 64, DEVICE, None, PLAIN, DTYPES["float16"])
        best = plans(problem)[int(forecast(problem, plans(problem)).argmin())]
        check(problem, pack_plan(problem, best), columns=np.arange(2))


@pytest.mark.slow
@compiled
def test_templates_compile_without_spills(arch: str, dtype: object) -> None:
    matrix = from_dense(np.eye(8, dtype=np.float32))
    problem = Problem(matrix, 256, DEVICE, None, Epilogue((0.5,) * 8, True, True), dtype)  # type: ignore[arg-type]
    vector = 16 // dtype.element_bytes  # type: ignore[attr-defined]
    for plan in (GroupCooPlan(4, 8, vector, 4, 4), GroupCooPlan(32, 32, vector, 16, 16), GroupCooPlan(16, 1, 1, 8, 4)):
        kernel = pack_plan(problem, plan)
        binary = binary_of(kernel, arch)
        assert binary.spill_bytes == 0 and binary.stack_bytes == 0


def test_it_is_a_family() -> None:
    assert FAMILIES["group_coo"].plans is plans
