"""Rows that are stored as soon as their sum is whole: what such kernels compute, and when they store."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.codegen import emit
from lospmm.device import DEVICES
from lospmm.dtype import DTYPES
from lospmm.early import DISTANCE, stored_early
from lospmm.epilogue import epilogue_of
from lospmm.errors import Unsupported
from lospmm.interpret import interpret
from lospmm.ir import Op
from lospmm.lower import lower
from lospmm.model import Problem
from lospmm.runtime import execute
from lospmm.runtime.geometry import geometry_of
from tests.emulated.drawn import random_matrix
from tests.emulated.test_chains import candidate_of

H200 = DEVICES["h200"]


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 83),
    together=st.sampled_from([1, 1, 2, 3]),
    prefetch=st.integers(1, 80),
    fmas_per_load=st.none() | st.integers(1, 12),
    lockstep=st.sampled_from([0, 16]),
    n=st.sampled_from([5, 40, 90_000, 3_000_001]),
    density=st.sampled_from([0.02, 0.2, 0.9]),
    relu=st.booleans(),
    bias=st.booleans(),
)
def test_machine_code(
    rows: int,
    together: int,
    prefetch: int,
    fmas_per_load: int | None,
    lockstep: int,
    n: int,
    density: float,
    relu: bool,
    bias: bool,
) -> None:
    """To the last bit what its program says, also where addresses move over windows, and right."""
    matrix = random_matrix(83, 60, density, seed=rows)
    epilogue = epilogue_of(np.linspace(-1, 1, 83).astype(np.float32) if bias else None, relu=relu, residual=False)
    problem = Problem(matrix, n, H200, epilogue=epilogue)
    axes = {"prefetch": prefetch, "fmas_per_load": fmas_per_load, "lockstep": lockstep}
    program = lower(problem, candidate_of(problem, rows, 32, **axes, tiles_per_block=together, stores_early=True))
    columns = np.array([0, 1, n - 1])
    b = np.random.default_rng(rows).uniform(-1, 1, (60, 3)).astype(np.float32)
    found = execute(emit(program, "sass", "sm_90"), geometry_of(program, n=n, cols=32), columns, b)
    np.testing.assert_array_equal(found.view(np.uint32), interpret(program, b).view(np.uint32))
    plain = lower(problem, candidate_of(problem, rows, 32, prefetch=prefetch))
    np.testing.assert_allclose(found, interpret(plain, b), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("sums", "together", "words"),
    [("float32", 1, 1), ("float32", 3, 1), ("float32", 1, 2), ("float32", 3, 2), ("float16", 1, 1), ("float16", 3, 1)],
)
def test_elements_of_16_bits(sums: str, together: int, words: int) -> None:
    """With sums in float32, of one column and of two, and as pairs: as where rows are stored at the end."""
    matrix = random_matrix(60, 70, 0.2)
    problem = Problem(matrix, 64, H200, dtype=DTYPES["float16"], sums=DTYPES[sums])
    b = DTYPES["float16"].rounded(np.random.default_rng(0).uniform(-1, 1, (70, 64)).astype(np.float32))
    found = []
    for stores_early in (False, True):
        axes = {"tiles_per_block": together, "stores_early": stores_early, "thread_words": words}
        candidate = candidate_of(problem, 12, 32, **axes)
        program = lower(problem, candidate)
        code, geometry = emit(program, "sass", "sm_90"), geometry_of(program, n=program.n, cols=32)
        found.append(execute(code, geometry, np.arange(64 // geometry.words.columns), b))
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=0.05 if sums == "float16" else 0.01)


@pytest.mark.parametrize("emitter", ["ptx", "sass"])
def test_rows_are_stored_when_they_are_finished(emitter: str) -> None:
    """Every row once, a few instructions behind its last multiply-add; some of them long before the end."""
    problem = Problem(random_matrix(96, 400, 0.02), 500, H200)
    program = lower(problem, candidate_of(problem, 48, 64, stores_early=True))
    for tile in program.tiles:
        stores, fmas = (np.flatnonzero(tile.code["op"] == op) for op in (Op.STORE, Op.FMA))
        assert stores.min() < len(tile.code) * 3 / 4
        assert len(np.unique(tile.code["target"][stores])) == len(stores) == tile.accumulators
        for store in stores:
            used = fmas[tile.code["target"][fmas] == tile.code["source"][store]]
            assert used.max() < store <= used.max() + DISTANCE + len(stores)
    b = np.random.default_rng(0).uniform(-1, 1, (400, 2)).astype(np.float32)
    found = execute(emit(program, emitter, "sm_90"), geometry_of(program, n=500, cols=64), np.array([0, 499]), b)
    np.testing.assert_array_equal(found.view(np.uint32), interpret(program, b).view(np.uint32))


def test_what_may_not_be_stored_early() -> None:
    matrix = random_matrix(24, 40, 0.3)
    with pytest.raises(Unsupported, match="stored early"):
        lower(Problem(matrix, 64, H200), candidate_of(Problem(matrix, 64, H200), 8, 32, split_k=2, stores_early=True))
    added = Problem(matrix, 64, H200, epilogue=epilogue_of(None, relu=False, residual=True))
    with pytest.raises(Unsupported, match="stored early"):
        lower(added, candidate_of(added, 8, 32, stores_early=True))
    assert stored_early(added, [candidate_of(added, 8, 32)]) == []
