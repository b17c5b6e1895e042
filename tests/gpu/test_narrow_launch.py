"""A kernel that is started for some of its columns alone: the number of columns at run time."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lospmm
from lospmm.codegen import emit
from lospmm.codegen.ir import grid, launch
from lospmm.codegen.lower import lower
from lospmm.cpu import execute
from lospmm.cpu.geometry import Run, geometry_of
from lospmm.errors import BadRequest, Unsupported
from lospmm.problem.device import DEVICES
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem, ceil_div
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order
from lospmm_datasets.synthetic import uniform


@given(
    n=st.integers(1, 5000),
    cols=st.integers(1, 40).map(lambda warps: 32 * warps),
    group=st.integers(0, 9),
    rows=st.integers(1, 50),
    share=st.floats(0, 1),
)
def test_the_first_blocks_alone(n: int, cols: int, group: int, rows: int, share: float) -> None:
    """Every block of the columns, at their own places, and no group of blocks without one of them."""
    whole = Launch(grid(rows, n, cols, group), cols, 99)
    columns = max(1, round(share * n))
    few = whole.narrowed(columns)
    x, y, z = few.grid
    assert (y, few.block, few.shared_bytes) == (rows, cols, 99)
    assert few.grid[0] == whole.grid[0] or z == 1  # or blocks would have other numbers
    needed = ceil_div(columns, cols)
    assert needed <= x * z < needed + whole.grid[0] and x * z <= whole.grid[0] * whole.grid[2]
    assert whole.narrowed(n) == whole


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 300), group=st.integers(0, 3), share=st.floats(0, 1))
def test_the_text_finds_its_columns(n: int, group: int, share: float) -> None:
    """PTX computes its place from the grid that it is started with."""
    matrix = uniform(20, 30, 0.7, seed=0)
    problem = Problem(matrix, n, DEVICES["h200"])
    schedule = Schedule(8, column_group=group)
    program = lower(problem, UnrolledPlan(TileSize(8, 32), schedule, natural_order(matrix, 8)))
    columns = np.arange(max(1, round(share * n)))
    b = np.random.default_rng(0).uniform(-1, 1, (30, n)).astype(np.float32)
    geometry = replace(geometry_of(program, cols=32), grid=launch(program).narrowed(len(columns)).grid)
    c = execute(emit(program, "ptx", "sm_90"), Run(geometry, columns, b[:, columns]))
    np.testing.assert_allclose(c, matrix.to_scipy() @ b[:, columns], atol=1e-5)


def test_a_kernel_says_how_it_is_started() -> None:
    weights = uniform(64, 48, 0.8, seed=0)
    kernel = lospmm.tune(weights, n=2000, device="h200", verify="none")
    shape = kernel.manifest["launch"]
    assert kernel.launch() == Launch(tuple(shape["grid"]), shape["block"], shape["shared_bytes"]) == kernel.launch(2000)
    x, _, z = kernel.launch(1).grid
    assert (x, z) == (1, 1)
    for wrong in (0, 2001, 1.5):
        with pytest.raises(BadRequest, match="columns"):
            kernel.launch(wrong)


def test_a_family_has_no_such_launch(tmp_path: Path) -> None:
    weights = uniform(64, 48, 0.8, seed=0)
    kernel = lospmm.tune(weights, n=64, device="h200", families="csr", verify="none")
    kernel.save(tmp_path / "kernel")
    with pytest.raises(Unsupported, match="family csr computes all columns: launch it for all 64"):
        kernel.launch(3)
    assert kernel.launch().grid == tuple(kernel.manifest["launch"]["grid"])
