"""csr and hyb: every plan computes A x B, the data hold A, and the templates compile without spills."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.cpu.block import execute_packed
from lospmm.families import FAMILIES
from lospmm.families.lane import MAX_GRID_SIDE, Lane, grid_of, lanes
from lospmm.families.rows import blocks_of, by_falling_length, entry_words, hyb_plans, teams_of
from lospmm.matrix import readers
from lospmm.matrix.csr import from_coo, from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Problem
from lospmm_datasets.synthetic import uneven, uniform
from tests.families.products import H200, binary_of, error_of, plain, problems
from tests.fixtures.covering import each_value
from tests.fixtures.real_layers import REAL_LAYERS, needs_real_layers

MINE = ("csr", "hyb")


@pytest.mark.slow
@given(problems(), st.sampled_from(MINE), st.data())
@settings(max_examples=30, deadline=None)
def test_every_plan_multiplies(problem: Problem, name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    assert family.refusal(problem) is None
    plan = data.draw(st.sampled_from(list(family.plans(problem))))
    assert error_of(problem, family.pack(problem, plan)) <= 1


@pytest.mark.parametrize(("name", "dtype"), [("csr", "float16"), ("hyb", "float32")])  # types differ in the data
def test_every_axis_multiplies(name: str, dtype: str) -> None:
    """Each value of each axis of the plans of one problem, in some plan."""
    problem = plain(uneven(70, 100, 0.8, seed=1, rows=1.5), 48, DTYPES[dtype])
    family = FAMILIES[name]
    for plan in each_value(family.plans(problem)):
        assert error_of(problem, family.pack(problem, plan)) <= 1, plan


@pytest.mark.parametrize("n", [1, 16])
def test_few_columns(n: int) -> None:
    """Rows of thousands of entries, shared by all the warps of a block, and N of a vector by a matrix."""
    rng = np.random.default_rng(n)
    dense = np.where(rng.random((9, 3000)) < 0.01, rng.normal(size=(9, 3000)), 0)
    dense[4] = rng.normal(size=3000)
    problem = plain(from_dense(dense.astype(np.float32)), n)
    for name in MINE:
        family = FAMILIES[name]
        plans = list(family.plans(problem))
        for at in {int(np.argmin(family.forecast(problem, plans))), len(plans) - 1}:
            assert error_of(problem, family.pack(problem, plans[at])) <= 1, plans[at]


@given(problems(), st.data())
@settings(max_examples=60, deadline=None)
def test_blocks_hold_every_row_once(problem: Problem, data: st.DataObject) -> None:
    """With room for the longest, and fewer steps than it without its last."""
    plan, matrix = data.draw(st.sampled_from(hyb_plans(problem))), problem.matrix
    _, lengths = by_falling_length(matrix)
    teams = teams_of(plan)
    top = teams.bit_length() - 1
    cuts = sorted(data.draw(st.lists(st.integers(0, matrix.m), max_size=top)))
    blocks = blocks_of(matrix, plan, [(top - at, end) for at, end in enumerate([*cuts, matrix.m])])
    ends = blocks.firsts + blocks.rows
    assert np.array_equal(blocks.firsts, [0, *ends[:-1]]) and ends[-1] == matrix.m
    assert (blocks.rows << blocks.shifts <= teams).all()
    surplus = (blocks.steps * plan.group << blocks.shifts) - lengths[blocks.firsts]
    assert ((surplus >= 0) & ((surplus < plan.group << blocks.shifts) | (blocks.steps == 1))).all()


@given(problems(columns=5000))
@settings(max_examples=60, deadline=None)
def test_plans_fit_the_gpu(problem: Problem) -> None:
    for name in MINE:
        family = FAMILIES[name]
        plans = list(family.plans(problem))
        assert plans and len(set(plans)) == len(plans)
        micros = family.forecast(problem, plans)
        assert micros.shape == (len(plans),) and (micros > 0).all() and np.isfinite(micros).all()
        for plan in plans:
            assert plan.warps * 32 <= H200.threads_per_block


def test_lanes_divide_n() -> None:
    matrix = uniform(8, 8, 0.5, seed=0)
    for name, n, expected in (
        ("float32", 4096, [(4, 32), (2, 32), (1, 32)]),
        ("float16", 4096, [(8, 32), (4, 32), (2, 32)]),
        ("float32", 3, [(1, 4)]),
        ("bfloat16", 16, [(8, 2), (4, 4), (2, 8)]),
        ("float32", 1, [(1, 1)]),
    ):
        assert lanes(plain(matrix, n, DTYPES[name])) == [Lane(*one) for one in expected]


def test_a_grid_of_millions_of_rows_is_folded() -> None:
    for blocks in (1, MAX_GRID_SIDE, MAX_GRID_SIDE + 1, 1 << 21):
        x, y, z = grid_of(3, blocks)
        assert x == 3 and y <= MAX_GRID_SIDE and blocks <= y * z < blocks + z


def test_wide_columns_take_two_words() -> None:
    """A column beyond 16 bits, of a 16-bit type."""
    matrix = from_coo((3, 70_000), np.array([0, 1, 2]), np.array([5, 66_000, 69_999]), np.array([1.0, 2.0, -3.0]))
    problem = plain(matrix, 8, DTYPES["float16"])
    assert entry_words(problem) == 2
    for name in MINE:
        family = FAMILIES[name]
        assert error_of(problem, family.pack(problem, family.plans(problem)[0])) <= 1


def test_an_infinity_stays_where_it_belongs() -> None:
    """Rows of B that a row of A does not name have no part in it, whatever they hold."""
    matrix = from_dense(np.array([[1, 0, 0], [0, 1, 0]], dtype=np.float32))
    problem = plain(matrix, 64)
    b = np.ones((3, 64), dtype=np.float32)
    b[0], b[2] = np.inf, np.nan
    for name in MINE:
        family = FAMILIES[name]
        for plan in each_value(family.plans(problem)):
            c = execute_packed(family.pack(problem, plan), np.arange(64), b, m=2)
            assert (c[1] == 1).all(), plan


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", "float32"), ("sm_90", "bfloat16")])
def test_templates_compile_without_spills(arch: str, dtype: str) -> None:
    device = DEVICES[{"sm_80": "a100", "sm_90": "h200"}[arch]]
    problem = Problem(uniform(768, 768, 0.95, seed=0), 4096, device, dtype=DTYPES[dtype])
    for name in MINE:
        plan = max(FAMILIES[name].plans(problem), key=lambda plan: (plan.group, plan.warps))
        kernel = FAMILIES[name].pack(problem, plan)
        binary = binary_of(kernel, arch)
        assert (binary.spill_bytes, binary.stack_bytes) == (0, 0), plan


@needs_real_layers
def test_real_layers() -> None:
    """The plan that the forecast takes, for a few layers of every collection."""
    paths = sorted(path for path in REAL_LAYERS.rglob("*") if path.suffix in (".smtx", ".npz"))[::19]
    assert paths
    for path in paths:
        for name in MINE:
            problem = plain(readers.read(path).matrix, 64, DTYPES["float16"])
            plans = list(FAMILIES[name].plans(problem))
            best = plans[int(np.argmin(FAMILIES[name].forecast(problem, plans)))]
            assert error_of(problem, FAMILIES[name].pack(problem, best)) <= 1, (path, best)
