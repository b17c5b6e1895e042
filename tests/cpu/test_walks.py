"""Code that is walked twice, a piece at a time: what it computes, what it keeps meanwhile, and who walks so."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lospmm.codegen import emit
from lospmm.codegen.emission import Emission
from lospmm.codegen.ir import KernelProgram, launch
from lospmm.codegen.lower import lower
from lospmm.codegen.sass.form import Opcode
from lospmm.codegen.sass.pieces import cut
from lospmm.cpu import execute
from lospmm.cpu.geometry import Run, geometry_of
from lospmm.cpu.verify import choose_columns, verify_on_cpu
from lospmm.errors import Unsupported, VerificationFailed
from lospmm.problem import long_rows as sums
from lospmm.problem.convolution import Convolution
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES, Dtype
from lospmm.problem.epilogue import PLAIN, Epilogue, epilogue_of
from lospmm.problem.operands import draw_b
from lospmm.problem.problem import Problem
from lospmm.space import walks
from lospmm.space.axes import _tiles, two_pass_plans
from lospmm.space.candidates import Schedule, TileSize, Tiling, UnrolledPlan, UnrolledPlans
from lospmm.space.constraints import runs
from lospmm.space.explore import explore
from lospmm.space.occupancy import registers_of_block
from lospmm.space.reorder import natural_order
from lospmm.tuning.build import for_emitter
from tests.cpu.drawn import random_matrix

H200 = DEVICES["h200"]


def problem_of(m: int, k: int, n: int, density: float, epilogue: Epilogue = PLAIN, seed: int = 0) -> Problem:
    return for_emitter(Problem(random_matrix(m, k, density, seed), n, H200, epilogue=epilogue), "sass")


def kernel_of(problem: Problem, rows: int, cols: int, prefetch: int, **axes: int) -> tuple[KernelProgram, Emission]:
    schedule = Schedule(prefetch, **axes)
    program = lower(problem, UnrolledPlan(TileSize(rows, cols), schedule, natural_order(problem.matrix, rows)))
    return program, emit(program, "sass", "sm_90")


def computed(problem: Problem, program: KernelProgram, emission: Emission, columns: np.ndarray) -> np.ndarray:
    """Those columns of C, of a B of which every column is drawn for itself."""
    geometry = geometry_of(program, cols=0)
    b = np.hstack([draw_b(problem.matrix, 1, int(column)) for column in columns])
    return execute(emission, Run(geometry, columns, b))


@settings(deadline=None, max_examples=12)
@given(
    rows=st.integers(1, 40),
    prefetch=st.sampled_from([1, 4, 5, 10, 15, 25, 40, 60]),
    density=st.sampled_from([0.02, 0.2, 0.9]),
    length=st.sampled_from([40, 150, 1750]),
    n=st.integers(64, 300),
    relu=st.booleans(),
    bias=st.booleans(),
    chain=st.sampled_from([3, 10, 256]),
)
@example(rows=13, prefetch=5, density=0.2, length=40, n=64, relu=True, bias=True, chain=3)
def test_they_compute_what_is_computed_without(
    rows: int, prefetch: int, density: float, length: int, n: int, relu: bool, bias: bool, chain: int
) -> None:
    """To the last bit, whatever pieces there are, and where the last block begins among columns of the one before."""
    epilogue = epilogue_of(np.linspace(-1, 1, 43).astype(np.float32) if bias else None, relu=relu, residual=False)
    problem = problem_of(43, 60, n, density, epilogue, seed=rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walks, "PIECE_INSTRUCTIONS", length)
        patch.setattr(sums, "PRODUCTS", chain)
        patch.setattr(sums, "SHARE", 1.0)
        program, emission = kernel_of(problem, rows, 32, prefetch, walks=2)
        geometry = geometry_of(program, cols=32)
        columns = geometry.together(choose_columns(n, 32))
        found = computed(problem, program, emission, columns)
        expected = computed(problem, *kernel_of(problem, rows, 32, prefetch), columns)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    assert launch(program).grid[0] * launch(program).grid[2] == -(-n // 64)


@pytest.mark.parametrize("rows", [64, 96, 146])
@pytest.mark.parametrize("prefetch", [40, 50, 60, 70])
def test_no_scoreboard_overflows(rows: int, prefetch: int) -> None:
    """The first loads of a walk and what tall tiles store between two walks share one, which counts to 63."""
    problem = problem_of(rows, 160, 128, 0.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walks, "PIECE_INSTRUCTIONS", 600)
        program, emission = kernel_of(problem, rows, 32, prefetch, walks=2)
        columns = geometry_of(program, cols=32).together(np.arange(2))
        found = computed(problem, program, emission, columns)
        expected = computed(problem, *kernel_of(problem, rows, 32, min(prefetch, 40)), columns)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(("n", "prefetch"), [(1_500_001, 1), (400_000, 5)])
def test_addresses_move_over_windows(n: int, prefetch: int) -> None:
    """Of B and of C, to either side."""
    problem = problem_of(20, 60, n, 0.4)
    program, emission = kernel_of(problem, 9, 64, prefetch, walks=2)
    columns = np.array([0, 1, n - 65, 64, 65, n - 1])
    columns = geometry_of(program, cols=64).together(columns)
    expected = computed(problem, *kernel_of(problem, 9, 64, 5), columns)
    np.testing.assert_array_equal(computed(problem, program, emission, columns), expected)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_pairs_of_16_bits(name: str) -> None:
    dtype: Dtype = DTYPES[name]
    problem = Problem(random_matrix(60, 70, 0.5), 256, H200, dtype=dtype, sums=dtype)
    program, emission = kernel_of(problem, 12, 32, 10, walks=2)
    assert verify_on_cpu(problem, program, emission).columns > 0


def test_pieces_are_about_as_long_as_each_other() -> None:
    problem = problem_of(96, 768, 4096, 0.1)
    program, emission = kernel_of(problem, 96, 512, 25, walks=2)
    (tile,) = program.tiles
    pieces = cut(tile.code, tile.buffers, 768)
    lengths = [len(piece.slot) + len(piece.rows) for piece in pieces]
    assert len(pieces) == 5
    assert max(lengths) - min(lengths) < 2 * 25 * 12  # a lap of the ring, at either end
    assert all((piece.rows[:25] == piece.first + np.arange(25)).all() for piece in pieces)
    assert sum(len(piece.slot) for piece in pieces) == problem.matrix.nnz
    assert emission.machine is not None and emission.machine.registers == 128 == program.registers
    back = emission.machine.form["offset"][(emission.machine.form["op"] == Opcode.BRA)]
    assert (back < 0).sum() == len(pieces)
    assert np.abs(back).max() < 32 << 10  # what is walked again fits the cache that it is walked from


def test_threads_keep_their_sums_apart() -> None:
    """One that is loaded from where another thread, or nobody, has put it is refused."""
    problem = problem_of(96, 768, 4096, 0.1)
    program, emission = kernel_of(problem, 96, 512, 25, walks=2)
    assert emission.machine is not None
    form = emission.machine.form
    for op, offset, message in (
        (Opcode.LDS, 16, "not the thread's own"),
        (Opcode.LDS, 4, "not the thread's own"),
        (Opcode.STS, 26 * 16 * 512, "has not written"),
    ):
        first = np.flatnonzero(form["op"] == op)[0]
        before = form["offset"][first]
        form["offset"][first] = before + offset
        with pytest.raises(VerificationFailed, match=message):
            verify_on_cpu(problem, program, emission)
        form["offset"][first] = before


def test_what_cannot_be_walked_twice_is_refused() -> None:
    plain = problem_of(40, 60, 4096, 0.3)
    with pytest.raises(Unsupported, match="2 walks need"):
        kernel_of(plain, 8, 64, 5, walks=2, split_k=2)
    with pytest.raises(Unsupported, match="2 walks need 1024 columns"):
        kernel_of(problem_of(40, 60, 1000, 0.3), 8, 512, 5, walks=2)
    with pytest.raises(Unsupported, match="the first 61 rows of B"):
        kernel_of(plain, 8, 64, 61, walks=2)
    with pytest.raises(Unsupported, match="no shared memory for 100 sums of each"):
        kernel_of(problem_of(100, 400, 4096, 0.3), 100, 576, 5, walks=2)
    residual = problem_of(40, 60, 4096, 0.3, epilogue_of(None, relu=False, residual=True))
    with pytest.raises(Unsupported, match="and no residual"):
        kernel_of(residual, 8, 64, 5, walks=2)
    program = lower(plain, UnrolledPlan(TileSize(8, 64), Schedule(5, walks=2), natural_order(plain.matrix, 8)))
    for language in ("ptx", "cuda"):
        with pytest.raises(Unsupported, match="2 walks"):
            emit(program, language, "sm_90")
    image = Convolution(batch=4, channels=60, height=32, width=32, kernel_height=1, kernel_width=1)
    of_image = Problem(random_matrix(40, 60, 0.3), 4096, H200, convolution=image)
    assert not walks.takes_two_passes(of_image, Schedule(5))


def test_those_that_come_in_waves_are_walked_twice() -> None:
    """Of tile sizes that fit, with what registers and shared memory leave, the best by the estimate first."""
    problem = problem_of(3072, 768, 4096, 0.02)

    def tilings(sizes: Sequence[int]) -> dict[int, Tiling]:
        return {rows: natural_order(problem.matrix, rows) for rows in sizes}

    sizes = UnrolledPlans.of(explore(problem, tilings, cols=[256, 512]).survivors)
    fastest = UnrolledPlan(TileSize(48, 512), Schedule(16), natural_order(problem.matrix, 48))
    found = two_pass_plans(problem, sizes, fastest)
    assert found
    candidates = UnrolledPlans.of([one for one, _ in found])
    assert runs(problem, candidates).all()
    for one, micros in found:
        assert micros >= found[0][1]
        program = lower(problem, one)
        assert registers_of_block(one.tile.cols, program.registers, H200) <= H200.registers_per_block
        assert launch(program).shared_bytes <= H200.shared_bytes_per_block
    assert {one.schedule.column_group for one, _ in found[:2]} == {2, 0}
    small = problem_of(768, 768, 1024, 0.02)
    assert not two_pass_plans(
        small, sizes, UnrolledPlan(TileSize(96, 512), Schedule(16), natural_order(small.matrix, 96))
    )


def test_as_many_rows_of_b_are_in_flight_as_there_is_room_for() -> None:
    """In registers, and within what one address reaches: of 65,536 columns 31 rows; of 20 rows no more than these."""

    def depths(k: int, n: int) -> dict[int, int]:
        problem = problem_of(3072, k, n, 0.02)
        sizes = [TileSize(rows, 256) for rows in (60, 100, 146, 190)]
        tiles = [UnrolledPlan(size, Schedule(8), natural_order(problem.matrix, size.rows)) for size in sizes]
        return {one.tile.rows: one.schedule.prefetch for one in _tiles(problem, UnrolledPlans.of(tiles))}

    assert depths(768, 4096) == {60: 70, 100: 70, 146: 70, 190: 50}
    assert set(depths(768, 65_536).values()) == {30}
    assert set(depths(20, 4096).values()) == {20}
