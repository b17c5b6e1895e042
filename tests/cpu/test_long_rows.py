"""Rows of more products than a chain may have: how exact they are, and that every emitter adds them up alike."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lospmm.codegen import emit
from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import lower
from lospmm.codegen.ops import Op
from lospmm.cpu import execute
from lospmm.cpu.geometry import Run, geometry_of
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem import long_rows as sums
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.long_rows import chain_limits
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan, UnrolledPlans
from lospmm.space.registers import forecast_of_candidate, forecast_of_each, forecast_registers, prefetch_of
from lospmm.space.reorder import natural_order, regroup
from lospmm.toolchain.discover import find_host_compiler
from tests.cpu.drawn_layers import Layer, layers
from tests.fixtures.interpret import Fma, Fold, StoreRow, instructions, interpret

H200 = DEVICES["h200"]

#: As short as that, so that drawn rows are long.
FEW = 3


@pytest.fixture(autouse=True)
def _any_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices whose rows are long for the most part."""
    monkeypatch.setattr(sums, "SHARE", 1.0)


@pytest.fixture
def _short_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "PRODUCTS", FEW)


#: The same in every example.
ALIKE = [HealthCheck.function_scoped_fixture]


def uneven(m: int, k: int, seed: int = 0) -> SparseMatrix:
    """Rows of a hundredth to all of the columns."""
    random = np.random.default_rng(seed)
    density = np.geomspace(0.01, 1, m)[:, np.newaxis]
    return from_dense(np.where(random.random((m, k)) < density, random.normal(size=(m, k)), 0))


def lowered(matrix: SparseMatrix, rows: int, n: int = 64, **axes: int) -> tuple[Problem, KernelProgram]:
    problem = Problem(matrix, n, H200)
    schedule = Schedule(**{"prefetch": 24, **axes})
    return problem, lower(problem, UnrolledPlan(TileSize(rows, 32), schedule, regroup(matrix, [rows])[rows]))


def error_of(program: KernelProgram, matrix: SparseMatrix, b: NDArray[np.float32]) -> float:
    """The greatest, relative to the greatest element."""
    exact = matrix.to_scipy().astype(np.float64) @ b.astype(np.float64)
    return float(np.abs(interpret(program, b) - exact).max() / np.abs(exact).max())


@pytest.mark.parametrize("activation", ["normal", "relu"])
def test_long_rows_are_exact_to_a_millionth(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 4,000 products, every one of which is in one chain otherwise."""
    random = np.random.default_rng(1)
    matrix = from_dense(random.normal(size=(4, 4000)))
    b = random.normal(size=(4000, 400)).astype(np.float32)
    b = np.maximum(b, 0) if activation == "relu" else b
    error = error_of(lowered(matrix, 4)[1], matrix, b)
    monkeypatch.setattr(sums, "PRODUCTS", matrix.nnz)
    in_one_chain = error_of(lowered(matrix, 4)[1], matrix, b)
    assert error < 6e-7 < 1.2e-6 < in_one_chain


@pytest.mark.parametrize("axes", [{}, {"split_k": 2}, {"split_k": 8}])
def test_no_chain_is_longer_than_its_limit(axes: dict[str, int]) -> None:
    matrix = uneven(40, 3000)
    problem, program = lowered(matrix, 8, **axes)
    limits = chain_limits(matrix, problem.dtype, program.split_k)
    assert 1 < np.isfinite(limits).sum() < 30
    folds = 0
    for tile in program.tiles:
        stored = [one.row for one in instructions(tile) if isinstance(one, StoreRow)]
        longest = np.zeros(tile.accumulators, int)
        lengths = np.zeros(tile.accumulators, int)
        for one in instructions(tile):
            match one:
                case Fma(accumulator):
                    lengths[accumulator] += 1
                    longest[accumulator] = max(longest[accumulator], lengths[accumulator])
                case Fold(accumulator, second):
                    folds += 1
                    assert lengths[second] > 0 and accumulator < second
                    lengths[second] = 0
                case StoreRow():
                    lengths[:] = 0
        assert stored
        if not axes:
            allowed = np.minimum(limits[stored], matrix.row_nnz[stored])
            assert (longest[: len(stored)] <= np.ceil(allowed)).all()
            assert tile.accumulators - len(stored) == np.isfinite(limits[stored]).sum()
    assert folds > 0


def test_short_rows_are_left_as_they_are() -> None:
    """Not a register more, not an instruction more; of other types no row is long."""
    matrix = from_dense(np.random.default_rng(0).normal(size=(16, 180)))
    _, program = lowered(matrix, 8)
    assert all(tile.accumulators == 8 and tile.count(Op.FOLD) == 0 for tile in program.tiles)
    long = from_dense(np.random.default_rng(0).normal(size=(4, 2000)))
    for name in ("tf32", "float16", "bfloat16"):
        assert np.isinf(chain_limits(long, DTYPES[name])).all()
    assert np.isfinite(chain_limits(long, DTYPES["float32"])).all()


def test_where_many_rows_are_long_each_is_one_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second accumulator for each would halve the rows of a tile; a quarter of the rows may have one."""
    monkeypatch.undo()
    weights = np.random.default_rng(0).normal(size=(16, 400))
    for long, is_cut in ((16, False), (5, False), (4, True), (1, True)):
        few = weights.copy()
        few[long:, 100:] = 0
        matrix = from_dense(few)
        limits = chain_limits(matrix, DTYPES["float32"])
        assert np.isfinite(limits).tolist() == [is_cut and row < long for row in range(16)]
        program = lowered(matrix, 16)[1]
        assert program.tiles[0].accumulators == 16 + is_cut * long
        assert program.registers == forecast_registers(16, Schedule(24), H200, is_cut * long)


def test_rows_of_a_small_norm_may_be_longer() -> None:
    weights = np.random.default_rng(0).normal(size=(3, 1024)).astype(np.float32)
    weights[1] /= 4
    weights[2] = 0
    assert np.square(weights).sum(axis=1).argmax() == 0
    limits = chain_limits(from_dense(weights), DTYPES["float32"])
    assert limits[0] == pytest.approx(sums.PRODUCTS) and np.isinf(limits[1:]).all()
    assert np.isinf(chain_limits(from_dense(weights), DTYPES["float32"], split_k=8)).all()


def test_an_empty_matrix_has_no_long_row() -> None:
    assert np.isinf(chain_limits(from_dense(np.zeros((3, 5))), DTYPES["float32"])).all()


@pytest.mark.parametrize("language", ["sass", "ptx", "cuda"])
def test_every_emitter_adds_up_alike(language: str) -> None:
    """To the last bit, with rows of up to 1,500 products."""
    if language == "cuda" and find_host_compiler() is None:
        pytest.skip("no g++ on this machine")
    matrix = uneven(12, 1500, seed=2)
    b = np.random.default_rng(3).normal(size=(1500, 40)).astype(np.float32)
    for axes in ({}, *([{"split_k": 4}] if language == "sass" else [])):
        _, program = lowered(matrix, 12, n=40, **axes)
        assert sum(tile.count(Op.FOLD) for tile in program.tiles) > 3
        c = execute(emit(program, language, "sm_90"), Run(geometry_of(program, cols=32), np.arange(40), b))
        np.testing.assert_array_equal(c, interpret(program, b))


@settings(max_examples=40, deadline=None, suppress_health_check=ALIKE)
@given(layer=layers(splits=(1, 1, 2, 4)) | layers(splits=(1, 1, 2, 4), is_convolution=False))
@pytest.mark.usefixtures("_short_chains")
def test_machine_code_of_short_chains(layer: Layer) -> None:
    """With padding, bias, residual and ReLU, held against the hazards of the hardware."""
    geometry = geometry_of(layer.program, cols=0)
    code = emit(layer.program, "sass", "sm_90")
    c = execute(code, Run(geometry, layer.columns, layer.hidden_b, layer.residual))
    np.testing.assert_array_equal(c, interpret(layer.program, layer.b, layer.residual))
    np.testing.assert_allclose(c, layer.expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None, suppress_health_check=ALIKE)
@given(layer=layers() | layers(is_convolution=False))
@pytest.mark.usefixtures("_short_chains")
def test_ptx_of_short_chains(layer: Layer) -> None:
    geometry = geometry_of(layer.program, cols=0)
    c = execute(emit(layer.program, "ptx", "sm_90"), Run(geometry, layer.columns, layer.hidden_b, layer.residual))
    np.testing.assert_array_equal(c, interpret(layer.program, layer.b, layer.residual))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 60), prefetch=st.integers(1, 80), split=st.sampled_from([1, 2, 8]))
def test_registers_are_forecast_with_second_accumulators(rows: int, prefetch: int, split: int) -> None:
    """No tile has more sums and buffers than the forecast counts, and none is counted that no tile has."""
    matrix = uneven(60, 2500)
    schedule = Schedule(prefetch, split_k=split)
    problem = Problem(matrix, 64, H200)
    candidate = UnrolledPlan(TileSize(rows, 32), schedule, natural_order(matrix, rows))
    program = lower(problem, candidate)
    plain = forecast_registers(rows, schedule, H200)
    forecast = forecast_of_candidate(problem, candidate)
    assert program.registers == forecast >= plain
    beside = H200.reserved_registers + 3 * (split > 1)
    most = max(tile.accumulators + tile.buffers for tile in program.tiles)
    assert most + beside <= forecast
    if split == 1:
        seconds = max(tile.accumulators - tile.count(Op.STORE) for tile in program.tiles)
        whole = forecast_registers(rows, schedule, H200, seconds)
        assert forecast == whole or prefetch_of(problem, candidate) < prefetch
    columns = UnrolledPlans.of([candidate, candidate])
    assert forecast_of_each(problem, columns).tolist() == [forecast] * 2


def test_long_rows_take_the_registers_of_buffers_where_a_block_has_no_others() -> None:
    """No more than they need, and no further than to the least buffers; a block of few threads has registers enough."""
    matrix = uneven(200, 1200)
    problem, tiling = Problem(matrix, 64, H200), natural_order(matrix, 90)
    for prefetch, cols in ((16, 512), (20, 512), (72, 512), (72, 64), (4, 512)):
        candidate = UnrolledPlan(TileSize(90, cols), Schedule(prefetch), tiling)
        has, forecast = prefetch_of(problem, candidate), forecast_of_candidate(problem, candidate)
        program = lower(problem, candidate)
        seconds = max(tile.accumulators - tile.count(Op.STORE) for tile in program.tiles)
        assert max(tile.buffers for tile in program.tiles) == has
        assert seconds > 8 and has >= max(prefetch - seconds, min(prefetch, 8))
        most = H200.registers_per_block // cols
        assert forecast <= most or has == max(prefetch - seconds, min(prefetch, 8))
        assert has == prefetch or forecast >= most
    assert has == 4
