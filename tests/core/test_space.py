"""Sections 3.1 to 3.4: the space, its constraints, and the paper's own example."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.constraints import CONSTRAINTS, Subject, dispatched_tiles
from lospmm.device import DEVICES, DeviceSpec
from lospmm.matrix import SparseMatrix, from_coo, from_dense
from lospmm.model import Candidate, Problem, Schedule, TileSize
from lospmm.registers import forecast_registers
from lospmm.reorder import natural_order, regroup
from lospmm.space import PREFETCHES, SHALLOWEST, Space, explore, tile_sizes, widen

H200 = DEVICES["h200"]

#: The device of Figures 2 and 3: 8 SMs, warps of 2, blocks of up to 4 threads, 6 registers a thread and 24 a block.
#: The figure counts accumulators alone: with one buffer for B, a thread's reserve is one register less than nothing.
FIGURE_3_DEVICE = DeviceSpec(
    name="figure3",
    title="the device of Figure 3",
    arch="sm_90",
    sms=8,
    warp_size=2,
    sub_partitions=1,
    registers_per_thread=6,
    registers_per_block=24,
    registers_per_sm=24,
    register_unit=1,
    reserved_registers=-1,
    threads_per_block=4,
    threads_per_sm=4,
    blocks_per_sm=1,
    shared_bytes_per_sm=1,
    shared_bytes_per_block=1,
    shared_unit_bytes=1,
    reserved_shared_bytes=0,
    l2_bytes=1,
    peak_flops=1.0,
    memory_bandwidth=1.0,
    clock_hz=1.0,
    source="LO-SpMM, Figure 3",
)

#: The pattern is drawn only in the figure; these row lengths meet every number that the text gives of it: 30 nonzeros,
#: 22 of them in the first 6 rows and 15 in the first 4.
FIGURE_3_ROW_NNZ = (6, 3, 4, 2, 4, 3, 4, 4)


def explored(problem: Problem) -> Space:
    return explore(problem, lambda limits: regroup(problem.matrix, limits))


def random_matrix(m: int, k: int, density: float, seed: int) -> SparseMatrix:
    rng = np.random.default_rng(seed)
    return from_dense(np.where(rng.random((m, k)) < density, rng.normal(size=(m, k)), 0))


def test_figure_3() -> None:
    dense = np.zeros((8, 8))
    for row, count in enumerate(FIGURE_3_ROW_NNZ):
        dense[row, :count] = 1
    problem = Problem(from_dense(dense), 8, FIGURE_3_DEVICE)
    space = explore(
        problem,
        lambda limits: {limit: natural_order(problem.matrix, limit) for limit in limits},
        base=Schedule(prefetch=1),
        cols=range(1, 9),
    )
    assert (space.size, space.after("registers"), space.after("utilization"), space.after("balance")) == (64, 38, 12, 6)
    refused = {verdict.tile: verdict for verdict in space.verdicts}
    # The text's two examples: M1 = 6 gives tiles of 22 and 8 nonzeros, N1 = 6 tiles of 6 and 2 columns.
    assert refused[TileSize(6, 4)].constraint == "row_imbalance"
    assert refused[TileSize(6, 4)].value == pytest.approx(7 / 15)
    assert (TileSize(4, 4) in {survivor.tile for survivor in space.survivors}) and space.relaxed == ()


def test_every_integer_m1_and_every_warp_multiple_n1_is_named() -> None:
    problem = Problem(random_matrix(40, 30, 0.3, 0), 100, H200)
    assert set(tile_sizes(problem)) == {TileSize(rows, cols) for rows in range(1, 41) for cols in (32, 64, 96, 128)}


shapes = st.tuples(st.integers(1, 40), st.integers(1, 40), st.sampled_from((0.0, 0.02, 0.2, 1.0)), st.integers(0, 99))


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 5_000), st.sampled_from(sorted(DEVICES)))
def test_verdicts_and_survivors_are_the_space_and_survivors_satisfy_every_constraint(
    shape: tuple[int, int, float, int], n: int, device: str
) -> None:
    problem = Problem(random_matrix(*shape), n, DEVICES[device])
    space = explored(problem)
    survivors = {survivor.tile for survivor in space.survivors}
    refused = {verdict.tile for verdict in space.verdicts}
    assert survivors | refused == set(tile_sizes(problem)) and not survivors & refused
    assert len(survivors) + len(space.verdicts) == space.size == len(tile_sizes(problem))
    assert survivors, "rules of thumb are moved rather than refuse every tile size"
    for survivor in space.survivors:
        for constraint in CONSTRAINTS:
            bound = constraint.check(Subject(problem, survivor.tile, survivor.schedule, survivor.tiling))
            assert bound.holds or constraint.name in space.relaxed
    for verdict in space.verdicts:
        assert verdict.value != verdict.limit


def test_a_threshold_that_nothing_meets_is_moved_to_the_best() -> None:
    # 33 columns waste 31 of 64 in every tile; 3 rows never make 66 blocks.
    space = explored(Problem(random_matrix(3, 50, 0.5, 1), 33, H200))
    assert "wasted_columns" in space.relaxed and "idle_sms" in space.relaxed
    assert {survivor.tile.cols for survivor in space.survivors} == {32, 64}


def test_empty_rows_count_as_blocks_that_write_zeros() -> None:
    dense = np.zeros((200, 10))
    dense[:8, 0] = 1.0
    problem = Problem(from_dense(dense), 32 * 70, H200)
    space = explored(problem)
    assert space.survivors[0].tiling.block_rows == 8 + 3  # M1 = 1: 8 tiles, and 192 empty rows in 3 blocks of 64


def test_widen_keeps_every_schedule_that_fits() -> None:
    problem = Problem(random_matrix(300, 64, 0.1, 2), 4096, H200)
    for survivor in explored(problem).survivors[::97]:
        widened = widen(problem, survivor)
        fits = [
            prefetch
            for prefetch in PREFETCHES
            if all(
                c.check(Subject(problem, survivor.tile, Schedule(prefetch))).holds
                for c in CONSTRAINTS
                if c.stage == "registers"
            )
        ]
        assert [c.schedule.prefetch for c in widened if c.schedule.column_group == 1] == fits
        assert all(isinstance(c, Candidate) and c.tiling is survivor.tiling for c in widened)


def test_the_forecast_counts_accumulators_buffers_and_reserve_in_whole_units() -> None:
    assert forecast_registers(32, Schedule(16), H200) == 64  # 32 + 16 + 16
    assert forecast_registers(33, Schedule(16), H200) == 72
    assert forecast_registers(223, Schedule(16), H200) == 255  # a unit more would be 256, which no thread can address
    assert forecast_registers(224, Schedule(16), H200) > H200.registers_per_thread


def test_a_b_too_wide_for_groups_of_columns_takes_all_of_them_together() -> None:
    problem = Problem(random_matrix(64, 64, 0.1, 3), 70_000_000, H200)
    survivors = explored(problem).survivors
    assert survivors
    assert {wider.schedule.column_group for wider in widen(problem, survivors[0])} == {0}


def test_very_many_rows_are_named_in_steps_and_dispatched_in_few_tiles() -> None:
    rows = 40_000
    tall = from_coo((rows, 512), np.arange(rows), np.arange(rows) % 512, np.ones(rows))
    problem = Problem(tall, 64, H200)
    heights = sorted({tile.rows for tile in tile_sizes(problem)})
    assert heights[:3] == [1, 5, 9]
    holds = [dispatched_tiles(Subject(problem, TileSize(height, 64), SHALLOWEST)).holds for height in heights[:4]]
    assert holds == [False, False, False, True]  # 40,000 / 9 is more than 4,096
