"""Section 5: what a proxy keeps of the kernels that it stands for, and that it is shorter."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lospmm.codegen.ir import TileProgram, grid
from lospmm.codegen.lower import lower
from lospmm.codegen.ops import Op
from lospmm.codegen.schedule import tile_programs
from lospmm.errors import BadRequest
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.device import DEVICES, DeviceSpec
from lospmm.problem.problem import Problem, ceil_div
from lospmm.space.candidates import ZERO_ROWS, Schedule, TileSize, Tiling, UnrolledPlan
from lospmm.space.occupancy import resident_blocks
from lospmm.space.registers import forecast_registers
from lospmm.space.reorder import regroup
from lospmm_datasets.synthetic import uniform
from lospmm_proxies import proxies
from lospmm_proxies.blocks import Cluster, cluster_limit, cluster_tiles, dispatch
from lospmm_proxies.launch import active_kernel_blocks, proxy_launch
from lospmm_proxies.loops import distinct_weights, iterations, kept_share, proxy_block, proxy_iterations
from tests.fixtures.interpret import instructions, interpret

H200 = DEVICES["h200"]
WIDTHS = (32, 96, 256)
SCHEDULES = (Schedule(4), Schedule(8, column_group=0), Schedule(3))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any density from empty to full, rows of equal or of very unequal length."""
    m, k = draw(st.integers(1, 60)), draw(st.integers(1, 90))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    density = draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]))
    unevenness = draw(st.sampled_from([0.0, 1.0]))
    of_row = density * (1 - unevenness * random.random((m, 1)))
    weights = np.where(random.random((m, k)) < of_row, random.uniform(1, 2, (m, k)), 0)
    return Problem(from_dense(weights), draw(st.integers(1, 3000)), draw(st.sampled_from([H200, DEVICES["v100"]])))


def candidates_of(problem: Problem, size_limits: list[int]) -> list[UnrolledPlan]:
    tilings = regroup(problem.matrix, size_limits)
    return [
        UnrolledPlan(TileSize(limit, width), schedule, tiling)
        for width in WIDTHS
        for limit, tiling in tilings.items()
        for schedule in SCHEDULES
    ]


def features(program: TileProgram) -> tuple[int, int]:
    return program.count(Op.LOAD), program.count(Op.FMA)


def tiling_of(features: list[tuple[int, int]]) -> Tiling:
    """Tiles of one row each with the given (nnc, nnz), which need not be those of any matrix."""
    nnc, nnz = np.array(features, dtype=np.int64).reshape(-1, 2).T
    rows = np.arange(len(features), dtype=np.int32)
    return Tiling(1, rows, np.ones_like(nnz), nnz, nnc, rows[:0])


@given(problems(), st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True))
def test_trials_are_shared_shorter_and_complete(problem: Problem, size_limits: list[int]):
    candidates = candidates_of(problem, size_limits)
    trials = proxies(problem, candidates)
    assert [trial.candidate for trial in trials] == candidates
    programs = {id(trial.program): trial.program for trial in trials}
    assert len(programs) == len({(c.tile.rows, c.schedule) for c in candidates})
    for trial in trials:
        kernel = lower(problem, trial.candidate)
        proxy = trial.program
        assert (proxy.n, proxy.cols) == (problem.n, None)
        assert (proxy.registers, proxy.column_group) == (kernel.registers, kernel.column_group)
        assert len(proxy.dispatch) == len(kernel.dispatch)
        assert set(proxy.dispatch) == set(range(len(proxy.tiles)))
        for ours, theirs in zip(proxy.dispatch, kernel.dispatch, strict=True):
            assert (features(proxy.tiles[ours]) == (0, 0)) == (features(kernel.tiles[theirs]) == (0, 0))
        assert max(map(len, (tile.code for tile in proxy.tiles))) <= max(map(len, (tile.code for tile in kernel.tiles)))
        assert trial.launch.grid == grid(kernel.block_rows, problem.n, trial.candidate.tile.cols, kernel.column_group)
        assert trial.launch.block == trial.candidate.tile.cols


@given(problems(), st.integers(1, 40), st.integers(1, 30), st.sampled_from(SCHEDULES))
def test_a_proxy_block_has_its_centroids_loads_and_multiply_adds(
    problem: Problem, size_limit: int, limit: int, schedule: Schedule
):
    matrix = problem.matrix
    tiling = regroup(matrix, [size_limit])[size_limit]
    clusters = cluster_tiles(tiling, limit)
    assert len(clusters) == min(limit, tiling.count)
    assert sorted(np.concatenate([[], *(c.tiles for c in clusters)])) == list(range(tiling.count))
    for cluster in clusters:
        assert abs(cluster.loads - tiling.nnc[cluster.tiles].mean()) <= 0.5
        assert abs(cluster.fmas - tiling.nnz[cluster.tiles].mean()) <= 0.5
        (block,) = proxy_block(matrix, tiling, cluster, schedule)
        loads, fmas = features(block)
        assert loads == min(cluster.loads, int(300 / (matrix.nnz / (matrix.m * matrix.k)) + 1e-9))
        assert abs(fmas - cluster.fmas * loads / cluster.loads) <= 0.5
        assert fmas >= loads
        assert block.buffers == min(schedule.prefetch, loads)
        rows = block.code["target"][block.code["op"] == Op.STORE]
        assert any(np.array_equal(rows, tiling.tiles[tile]) for tile in cluster.tiles)
        check_code(block, matrix, rows)


def check_code(block: TileProgram, matrix: SparseMatrix, rows: np.ndarray):
    """No instruction that a compiler could drop or merge, and rows of B that the tile of ``rows`` reads too."""
    loads, fmas = (block.code[block.code["op"] == op] for op in (Op.LOAD, Op.FMA))
    of_tile = np.unique(matrix.to_scipy()[rows].indices)
    assert np.array_equal(loads["source"], of_tile[: len(loads)])
    assert len(np.unique(fmas["weight"])) == len(fmas)
    assert np.all((fmas["weight"] > 1) & (fmas["weight"] < 2))
    uses = np.bincount(fmas["target"], minlength=block.accumulators)
    assert uses.max() - uses.min() <= 1


@given(problems(), st.integers(1, 40))
def test_every_run_makes_the_same_proxies(problem: Problem, size_limit: int):
    first, again = (proxies(problem, candidates_of(problem, [size_limit])) for _ in range(2))
    assert [(t.program, t.launch) for t in first] == [(t.program, t.launch) for t in again]


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=60),
    st.integers(1, 70),
)
def test_clusters_are_a_partition_of_the_size_that_was_asked_for(pairs: list[tuple[int, int]], limit: int):
    tiling = tiling_of(pairs)
    clusters = cluster_tiles(tiling, limit)
    assert len(clusters) == min(limit, len(pairs))
    assert Counter(tile for c in clusters for tile in c.tiles.tolist()) == Counter(range(len(pairs)))
    blocks = dispatch(tiling, clusters)
    assert all(tile in clusters[block].tiles for tile, block in enumerate(blocks))
    first_uses = [blocks.index(block) for block in range(len(clusters))]
    assert first_uses == sorted(first_uses)


def test_tiles_far_apart_are_not_one_cluster():
    tiling = tiling_of([(10, 20), (90, 400), (11, 21), (50, 100), (91, 402), (12, 20)])
    clusters = [(c.tiles.tolist(), c.loads, c.fmas) for c in cluster_tiles(tiling, 3)]
    assert clusters == [([0, 2, 5], 11, 20), ([1, 4], 90, 401), ([3], 50, 100)]


def test_equal_tiles_are_shared_out_so_that_neighbours_run_different_code():
    tiling = tiling_of([(5, 9)] * 6 + [(7, 9)] * 2)
    assert dispatch(tiling, cluster_tiles(tiling, 4)) == (0, 1, 2, 0, 1, 2, 3, 3)
    assert dispatch(tiling, cluster_tiles(tiling, 99)) == (0, 1, 2, 3, 4, 5, 6, 7)


def test_many_tiles_are_clustered_by_their_distinct_features():
    lengths = np.random.default_rng(0).integers(10, 150, 50_000)
    clusters = cluster_tiles(tiling_of([(int(length), int(length)) for length in lengths]), 96)
    spans = [np.ptp(lengths[cluster.tiles]) for cluster in clusters]
    assert len(clusters) == 96
    assert max(spans) <= 3


def test_the_loop_is_cut_where_instruction_misses_no_longer_change():
    matrix = uniform(40, 2000, 0.5, seed=1)
    assert iterations(2000, matrix) == 600
    assert iterations(599, matrix) == 599
    tiling = regroup(matrix, [8])[8]
    assert tiling.nnc.min() > 600
    (cluster, *_) = cluster_tiles(tiling, 1)
    loads, fmas = features(*proxy_block(matrix, tiling, cluster, Schedule(8)))
    assert loads == 600
    assert fmas == round(cluster.fmas * 600 / cluster.loads)


def test_the_share_that_is_kept_falls_with_the_rows_of_a_tile():
    problem = Problem(uniform(40, 2000, 0.5, seed=1), 512, H200)
    tilings = regroup(problem.matrix, [1, 4, 40])
    trials = proxies(
        problem, [UnrolledPlan(TileSize(rows, 64), Schedule(4), tiling) for rows, tiling in tilings.items()]
    )
    assert [kept_share(trial) for trial in trials] == pytest.approx([0.6, 0.32, 0.3], rel=0.02)


def test_nearly_empty_and_full_matrices_are_never_cut_below_300():
    assert iterations(10_000, from_dense(np.ones((3, 4)))) == 300
    one = np.zeros((100, 100))
    one[3, 4] = 1
    assert iterations(100, from_dense(one)) == 100


def test_uneven_means_are_spread_over_the_iterations():
    columns = np.array([2, 3, 5, 7], dtype=np.int32)
    accumulator, column, _ = proxy_iterations(columns, 10, 3)
    assert column.tolist() == [2, 2, 3, 3, 3, 5, 5, 7, 7, 7]
    assert accumulator.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


def test_weights_repeat_only_after_all_mantissas():
    weights = distinct_weights(2**23 - 1)
    assert len(np.unique(weights)) == len(weights)
    assert weights.min() > 1
    assert weights.max() < 2


def test_a_cluster_of_one_tile_differs_from_the_tile_in_its_weights_alone():
    """The kernel's schedule: same loads in the same places, however many multiply-adds each column has in the tile."""
    matrix = from_dense(np.full((6, 40), 3.0))
    tiling = regroup(matrix, [3])[3]
    for schedule in SCHEDULES:
        (proxy,) = proxy_block(matrix, tiling, Cluster(np.array([0]), tiling.nnc[0], tiling.nnz[0]), schedule)
        kernel = tile_programs(matrix, tiling.tiles[0], schedule)[0]
        fields = ["op", "target", "source"]
        assert np.array_equal(proxy.code[fields], kernel.code[fields])
        assert len(list(instructions(proxy))) == len(list(instructions(kernel)))


def test_an_empty_matrix_has_one_block_that_writes_zeros():
    problem = Problem(from_dense(np.zeros((3 * ZERO_ROWS + 1, 5))), 100, H200)
    trials = proxies(problem, candidates_of(problem, [2]))
    for trial in trials:
        (zeros,) = trial.program.tiles
        assert (features(zeros), zeros.count(Op.STORE)) == ((0, 0), ZERO_ROWS)
        assert trial.program.dispatch == (0, 0, 0, 0)


def test_a_single_tile_runs():
    problem = Problem(uniform(4, 30, 0.5, seed=0), 64, H200)
    (tiling,) = regroup(problem.matrix, [4]).values()
    (trial,) = proxies(problem, [UnrolledPlan(TileSize(4, 64), Schedule(4), tiling)])
    assert trial.program.dispatch == (0,)
    c = interpret(trial.program, np.ones((30, 64), dtype=np.float32))
    assert np.all(np.isfinite(c)) and np.all(c != 0)


#: The V100's units of shared memory leave out five numbers of blocks.
EXACT_DEVICES = [device for device in DEVICES.values() if device.name != "v100"]


@given(
    device=st.sampled_from(EXACT_DEVICES),
    rows=st.integers(1, 230),
    cols=st.integers(1, 32).map(lambda warps: 32 * warps),
    n=st.integers(1, 50_000),
    compiled_registers=st.integers(16, 255),
)
def test_a_proxy_has_the_kernels_occupancy(device: DeviceSpec, rows: int, cols: int, n: int, compiled_registers: int):
    """Also when the compiler finds a use for fewer registers than the forecast."""
    tiling = replace(tiling_of([(1, 1)] * ceil_div(300, rows)), size_limit=rows)
    problem = Problem(from_dense(np.eye(300)), n, device)
    candidate = UnrolledPlan(TileSize(rows, cols), Schedule(4), tiling)
    registers = forecast_registers(rows, candidate.schedule, device)
    fits = resident_blocks(device, threads=cols, registers_per_thread=registers, shared_bytes=0)
    if not fits:
        with pytest.raises(BadRequest, match="does not fit"):
            proxy_launch(problem, candidate)
        return
    launch = proxy_launch(problem, candidate)
    blocks = math.prod(launch.grid)
    assert active_kernel_blocks(problem, candidate) == min(fits, ceil_div(blocks, device.sms))
    found = resident_blocks(
        device,
        threads=launch.block,
        registers_per_thread=min(compiled_registers, registers),
        shared_bytes=launch.shared_bytes,
    )
    assert found == active_kernel_blocks(problem, candidate)


def test_equation_5_is_held_to_what_the_hardware_has_room_for():
    problem = Problem(uniform(768, 768, 0.9, seed=0), 4096, H200)
    tiling = regroup(problem.matrix, [1])[1]
    narrow, wide = (UnrolledPlan(TileSize(1, cols), Schedule(4), tiling) for cols in (32, 1024))
    assert active_kernel_blocks(problem, narrow) == 32  # 65536 registers would hold 85 blocks of 32 x 24
    assert active_kernel_blocks(problem, wide) == 2
    assert cluster_limit(problem, [wide]) == 6
    assert cluster_limit(problem, [narrow, wide]) == 96
