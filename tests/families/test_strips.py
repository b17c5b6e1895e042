"""Strips with dense blocks, the third of hyb: what is a block, that all of A is in the data, and the product."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.cpu.block import execute_packed
from lospmm.families import hyb, strips
from lospmm.families.buckets import Buckets
from lospmm.families.strips import SIDES, Strips, split
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import Epilogue
from lospmm.problem.problem import Problem
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.template import emission_of
from tests.families.products import H200, error_of, matrices, plain


def blocked(m: int, k: int, side: int, *, blocks: float, filled: float, beside: float, seed: int = 0) -> SparseMatrix:
    """Blocks of ``side``, a share ``filled`` of them nonzero, in half of the block rows; and single entries."""
    rng = np.random.default_rng(seed)
    shape = (-(-m // side), -(-k // side))
    places = rng.random(shape) < blocks
    places[rng.random(shape[0]) < 0.5] = False
    there = np.kron(places, np.ones((side, side)))[:m, :k] * (rng.random((m, k)) < filled)
    there = np.maximum(there, rng.random((m, k)) < beside)
    return from_dense(there * rng.standard_normal((m, k)))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    side = draw(st.sampled_from([4, 8]))
    sizes = draw(st.integers(1, 70)), draw(st.integers(1, 60))
    shares = {"blocks": draw(st.sampled_from([0.1, 0.5, 1.0])), "filled": draw(st.sampled_from([0.5, 0.9, 1.0]))}
    matrix = blocked(*sizes, side, **shares, beside=draw(st.sampled_from([0.0, 0.03])), seed=draw(st.integers(0, 99)))
    bias = tuple(np.linspace(-1, 1, matrix.m).tolist()) if draw(st.booleans()) else None
    epilogue = Epilogue(bias=bias, relu=draw(st.booleans()), residual=draw(st.booleans()))
    dtype = DTYPES[draw(st.sampled_from(list(DTYPES)))]
    return Problem(matrix, draw(st.integers(1, 80)), H200, epilogue=epilogue, dtype=dtype)


@given(problems(), st.sampled_from(SIDES), st.sampled_from([1, 40, 75, 100]))
@settings(max_examples=60, deadline=None)
def test_blocks_are_those_that_are_full_enough(problem: Problem, side: int, fill: int) -> None:
    matrix = problem.matrix
    found = split(matrix, side, fill)
    dense, wide = matrix.to_scipy().toarray() != 0, -(-matrix.k // side)
    padded = np.zeros((-(-matrix.m // side) * side, wide * side), dtype=bool)
    padded[: matrix.m, : matrix.k] = dense
    counts = padded.reshape(-1, side, wide, side).sum(axis=(1, 3))
    full = counts * 100 >= fill * side * side
    held = np.where(full, counts, 0).sum(axis=1)
    own = (held > 0) & (2 * held >= counts.sum(axis=1))
    assert np.array_equal(found.of_strips, own)
    assert np.array_equal(found.blocks, np.flatnonzero(full & own[:, np.newaxis]))
    assert np.count_nonzero(found.in_blocks) == counts[full & own[:, np.newaxis]].sum()


@given(problems(), st.data())
@settings(max_examples=40, deadline=None)
def test_every_plan_computes_the_product(problem: Problem, data: st.DataObject) -> None:
    found = strips.plans(problem)
    if not found:
        return
    plan = data.draw(st.sampled_from(found))
    assert error_of(problem, hyb.pack_plan(problem, plan)) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", [Strips(1, 1, 4, 32, 8, 8, 40), Strips(4, 4, 4, 32, 8, 4, 75)])
def test_a_long_strip_is_shared_by_warps(dtype: str, plan: Strips) -> None:
    """Blocks and lists of a strip, dealt to all teams of a block and added up row by row."""
    matrix = blocked(40, 2100, 8, blocks=0.7, filled=0.95, beside=0.01, seed=4)
    problem = plain(matrix, 4 if plan.vector == 4 else 3, DTYPES[dtype])
    assert plan.of_buckets.teams > 32 // plan.team
    assert error_of(problem, strips.pack_plan(problem, plan)) <= 1


@given(matrices())
@settings(max_examples=30, deadline=None)
def test_scattered_nonzeros_have_none(matrix: SparseMatrix) -> None:
    """But what is asked for is computed, where no strip has a block too."""
    problem = plain(matrix, 8)
    density = matrix.nnz / (matrix.m * matrix.k)
    if density < 0.05 and min(matrix.m, matrix.k) > 16:
        assert not any(plan.fill == 75 and plan.side == 8 for plan in strips.plans(problem))
    assert error_of(problem, strips.pack_plan(problem, Strips(4, 2, 4, 32, 4, 8, 100))) <= 1


def test_blocks_are_forecast_to_be_faster_than_their_entries() -> None:
    """A row of B is read once for a block of rows: less than once for each of its entries."""
    matrix = blocked(2048, 2048, 8, blocks=0.2, filled=1.0, beside=0.0)
    problem = plain(matrix, 2048)
    of_kind = {
        kind: min(hyb.forecast(problem, [plan for plan in hyb.plans(problem) if isinstance(plan, kind)]))
        for kind in (Strips, Buckets)
    }
    assert of_kind[Strips] < of_kind[Buckets]
    counts = strips.counted(matrix, 8, 75)
    assert counts.held == pytest.approx(matrix.nnz) and counts.blocks * 64 == pytest.approx(matrix.nnz)
    assert not strips.plans(replace(problem, matrix=blocked(512, 512, 8, blocks=0.0, filled=1.0, beside=0.1)))


def test_its_zeros_are_multiplied() -> None:
    """As the pages say: an infinity of B reaches other rows of the strip, and no other."""
    dense = np.zeros((16, 8), dtype=np.float32)
    dense[:8] = 1.0
    dense[0, 0], dense[12, 3] = 0.0, 2.0
    problem = plain(from_dense(dense), 8)
    kernel = strips.pack_plan(problem, Strips(4, 2, 4, 32, 4, 8, 75))
    b = np.ones((8, 8), dtype=np.float32)
    b[0] = np.inf
    c = execute_packed(kernel, np.arange(8), b, m=16)
    assert np.isnan(c[0]).all() and np.isinf(c[1]).all() and (c[12] == 2).all() and (c[15] == 0).all()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_template_compiles_without_spills(arch: str, dtype: str, tmp_path: Path) -> None:
    """The largest blocks with the widest vectors."""
    matrix = blocked(64, 64, 8, blocks=0.5, filled=1.0, beside=0.01)
    vector = 16 // DTYPES[dtype].element_bytes
    kernel = strips.pack_plan(plain(matrix, 512, DTYPES[dtype]), Strips(vector, 32, 4, 32, 8, 8, 75))
    store = Store(tmp_path)
    binary = compile_kernel(emission_of(kernel), arch=arch, registers=kernel.registers, store=store, workers=1)
    assert (binary.spill_bytes, binary.stack_bytes) == (0, 0)
