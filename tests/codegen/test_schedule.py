"""Algorithm 2 and its interpreter: the program of a tile computes the tile, within the registers it was given."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import lower
from lospmm.codegen.ops import Op
from lospmm.codegen.schedule import tile_programs
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.candidates import COLUMN_GROUPS, Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order, regroup
from tests.fixtures.interpret import Fma, LoadRow, StoreRow, instructions, interpret


@st.composite
def matrices(draw: st.DrawFn) -> SparseMatrix:
    m, k = draw(st.integers(1, 24)), draw(st.integers(1, 40))
    density = draw(st.sampled_from((0.0, 0.03, 0.2, 0.7, 1.0)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return from_dense(np.where(rng.random((m, k)) < density, rng.normal(size=(m, k)), 0))


schedules = st.builds(
    Schedule,
    prefetch=st.integers(1, 50),
    column_group=st.sampled_from(COLUMN_GROUPS),
)


@settings(max_examples=150, deadline=None)
@given(matrices(), schedules, st.integers(1, 30), st.booleans())
def test_a_lowered_kernel_is_the_product(matrix: SparseMatrix, schedule: Schedule, rows: int, natural: bool) -> None:
    tiling = natural_order(matrix, rows) if natural else regroup(matrix, [rows])[rows]
    problem = Problem(matrix, 5, DEVICES["h200"])
    program = lower(problem, UnrolledPlan(TileSize(rows, 32), schedule, tiling))
    b = np.random.default_rng(0).normal(size=(matrix.k, 5)).astype(np.float32)
    c = interpret(program, b)  # what no Store wrote is NaN
    exact = matrix.to_scipy().astype(np.float64) @ b.astype(np.float64)
    scale = abs(matrix.to_scipy().astype(np.float64)) @ np.abs(b.astype(np.float64))
    assert np.all(np.abs(c - exact) <= 1e-5 * scale)
    assert program.dispatch == tuple(range(tiling.block_rows))


@settings(max_examples=150, deadline=None)
@given(matrices(), schedules)
def test_loads_stay_ahead_and_no_buffer_is_overwritten_before_its_last_use(
    matrix: SparseMatrix, schedule: Schedule
) -> None:
    rows = np.flatnonzero(matrix.row_nnz).astype(np.int32)
    program = tile_programs(matrix, rows, schedule)[0]
    assert program.buffers <= schedule.prefetch
    holds: dict[int, int] = {}  # what each buffer holds
    expected = iter(sorted((int(k), int(r)) for r, k in zip(matrix.rows_of_nonzeros(), matrix.indices, strict=True)))
    for instruction in instructions(program):
        match instruction:
            case LoadRow(buffer, k):
                holds[buffer] = k
            case Fma(accumulator, buffer, weight):
                assert (holds[buffer], int(rows[accumulator])) == next(expected)
                assert weight != 0
            case StoreRow():
                assert next(expected, None) is None
    assert program.count(Op.LOAD) == len(set(matrix.indices.tolist()))
    assert program.count(Op.FMA) == matrix.nnz


def test_each_load_waits_for_a_free_buffer_and_no_longer() -> None:
    # Three columns of two nonzeros, two loads ahead: the third load stands right behind the first column's uses.
    program = tile_programs(from_dense(np.ones((2, 3))), np.arange(2, dtype=np.int32), Schedule(prefetch=2))[0]
    ops = "".join("LFS"[op] for op in program.code["op"])
    assert ops == "LLFFLFFFFSS"


def test_empty_rows_are_stored_64_a_block_without_accumulators() -> None:
    dense = np.zeros((150, 4))
    dense[7] = 1.0
    matrix = from_dense(dense)
    candidate = UnrolledPlan(TileSize(8, 32), Schedule(4), regroup(matrix, [8])[8])
    program = lower(Problem(matrix, 3, DEVICES["h200"]), candidate)
    assert [tile.accumulators for tile in program.tiles] == [1, 0, 0, 0]
    assert [len(tile.code) for tile in program.tiles[1:]] == [64, 64, 21]


def test_two_kernels_of_one_candidate_are_equal() -> None:
    matrix = from_dense(np.eye(6))
    candidate = UnrolledPlan(TileSize(2, 32), Schedule(4), regroup(matrix, [2])[2])
    problem = Problem(matrix, 3, DEVICES["h200"])
    one, other = lower(problem, candidate), lower(problem, candidate)
    assert isinstance(one, KernelProgram) and one == other and hash(one) == hash(other)
