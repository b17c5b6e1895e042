"""Machine code stores rows as soon as their sum is whole: what such kernels compute, and when they store."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.codegen import emit
from lospmm.codegen.lower import lower
from lospmm.codegen.ops import Op
from lospmm.codegen.sass.early import DISTANCE, stored_early
from lospmm.codegen.sass.form import Opcode
from lospmm.cpu import execute
from lospmm.cpu.geometry import Run, geometry_of
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import PLAIN, Epilogue, epilogue_of
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order
from tests.cpu.drawn import random_matrix
from tests.fixtures.interpret import interpret

H200 = DEVICES["h200"]


def candidate_of(problem: Problem, rows: int, cols: int, **axes: int) -> UnrolledPlan:
    return UnrolledPlan(TileSize(rows, cols), Schedule(**{"prefetch": 8, **axes}), natural_order(problem.matrix, rows))


@settings(deadline=None, max_examples=10)
@given(
    rows=st.integers(1, 83),
    prefetch=st.integers(1, 80),
    n=st.sampled_from([5, 40, 90_000, 3_000_001]),
    density=st.sampled_from([0.02, 0.2, 0.9]),
    relu=st.booleans(),
    bias=st.booleans(),
)
def test_machine_code(
    rows: int,
    prefetch: int,
    n: int,
    density: float,
    relu: bool,
    bias: bool,
) -> None:
    """To the last bit what its program says, also where addresses move over windows, and right."""
    matrix = random_matrix(83, 60, density, seed=rows)
    epilogue = epilogue_of(np.linspace(-1, 1, 83).astype(np.float32) if bias else None, relu=relu, residual=False)
    problem = Problem(matrix, n, H200, epilogue=epilogue)
    program = lower(problem, candidate_of(problem, rows, 32, prefetch=prefetch))
    columns = np.array([0, 1, n - 1])
    b = np.random.default_rng(rows).uniform(-1, 1, (60, 3)).astype(np.float32)
    found = execute(emit(program, "sass", "sm_90"), Run(geometry_of(program, cols=32), columns, b))
    np.testing.assert_array_equal(found.view(np.uint32), interpret(program, b).view(np.uint32))
    plain = lower(problem, candidate_of(problem, rows, 32, prefetch=prefetch))
    np.testing.assert_allclose(found, interpret(plain, b), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("sums", "words"), [("float32", 1), ("float32", 2), ("float16", 1)])
def test_elements_of_16_bits(sums: str, words: int) -> None:
    """With sums in float32, of one column and of two, and as pairs: as two blocks to a tile, which store at the end, or
    as one column to a thread."""
    matrix = random_matrix(60, 70, 0.2)
    problem = Problem(matrix, 64, H200, dtype=DTYPES["float16"], sums=DTYPES[sums])
    b = DTYPES["float16"].rounded(np.random.default_rng(0).uniform(-1, 1, (70, 64)).astype(np.float32))
    found = []
    for axes in ({"thread_words": words}, {"split_k": 2}):
        program = lower(problem, candidate_of(problem, 12, 32, **axes))
        code, geometry = emit(program, "sass", "sm_90"), geometry_of(program, cols=32)
        found.append(execute(code, Run(geometry, np.arange(64 // geometry.words.columns), b)))
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=0.05 if sums == "float16" else 0.01)


def test_rows_are_stored_when_they_are_finished() -> None:
    """Every row once, a few instructions behind its last multiply-add; some of them long before the end."""
    problem = Problem(random_matrix(96, 400, 0.02), 500, H200)
    program = lower(problem, candidate_of(problem, 48, 64))
    for tile in program.tiles:
        early = stored_early(tile, program)
        stores, fmas = (np.flatnonzero(early.code["op"] == op) for op in (Op.STORE, Op.FMA))
        assert stores.min() < len(early.code) * 3 / 4
        assert len(np.unique(early.code["target"][stores])) == len(stores) == early.accumulators
        for store in stores:
            used = fmas[early.code["target"][fmas] == early.code["source"][store]]
            assert used.max() < store <= used.max() + DISTANCE + len(stores)
    emission = emit(program, "sass", "sm_90")
    assert emission.machine is not None
    first = emission.machine.form[: emission.machine.starts[1]]["op"]
    stores, fmas = (np.flatnonzero(first == op) for op in (Opcode.STG, Opcode.FFMA_IMM))
    assert len(stores) == 48 and (stores < fmas.max()).sum() > 12
    b = np.random.default_rng(0).uniform(-1, 1, (400, 2)).astype(np.float32)
    found = execute(emission, Run(geometry_of(program, cols=64), np.array([0, 499]), b))
    np.testing.assert_array_equal(found.view(np.uint32), interpret(program, b).view(np.uint32))


@pytest.mark.parametrize(
    ("epilogue", "axes"), [(PLAIN, {"split_k": 2}), (epilogue_of(None, relu=False, residual=True), {})]
)
def test_what_is_not_stored_early(epilogue: Epilogue, axes: dict[str, int]) -> None:
    """Parts of a tile meet behind their sums, and a residual is added there."""
    problem = Problem(random_matrix(24, 40, 0.3), 64, H200, epilogue=epilogue)
    program = lower(problem, candidate_of(problem, 8, 32, **axes))
    assert all(stored_early(tile, program) is tile for tile in program.tiles)


def test_rows_of_zeros_stay_as_they_are() -> None:
    problem = Problem(
        random_matrix(24, 40, 0.02), 64, H200, epilogue=epilogue_of(np.ones(24), relu=False, residual=False)
    )
    program = lower(problem, candidate_of(problem, 8, 32))
    zeros = [tile for tile in program.tiles if not tile.count(Op.FMA)]
    assert zeros and all(stored_early(tile, program) is tile for tile in zeros)
