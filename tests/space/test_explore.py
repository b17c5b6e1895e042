"""Sections 3.1 to 3.4: the space, its constraints, and the paper's own example."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.matrix.csr import SparseMatrix, from_coo, from_dense
from lospmm.problem.device import DEVICES, DeviceSpec
from lospmm.problem.problem import SPLITS, Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan, UnrolledPlans
from lospmm.space.constraints import CONSTRAINTS, Constraint, Subject, dispatched_tiles, runs
from lospmm.space.explore import DEEP, DEEP_THREADS, PREFETCHES, SHALLOWEST, Space, explore, tile_sizes, widen
from lospmm.space.registers import forecast_registers
from lospmm.space.reorder import natural_order, regroup
from lospmm.tuning.options import splits_of

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


def explored(problem: Problem, splits: tuple[int, ...] = (1,)) -> Space:
    return explore(problem, lambda limits: regroup(problem.matrix, limits), splits=splits)


def holds(problem: Problem, constraint: Constraint, candidate: UnrolledPlan, splits: tuple[int, ...] = (1,)) -> bool:
    return bool(constraint.check(Subject(problem, UnrolledPlans.of([candidate]), splits)).holds.all())


def random_matrix(m: int, k: int, density: float, seed: int) -> SparseMatrix:
    rng = np.random.default_rng(seed)
    return from_dense(np.where(rng.random((m, k)) < density, rng.normal(size=(m, k)), 0))


def test_no_survivor_lacks_the_registers_of_its_long_rows() -> None:
    """Which rows of a tile are long is known once rows are regrouped."""
    rng = np.random.default_rng(0)
    density = np.where(np.arange(256) % 8 == 0, 0.9, 0.02)[:, None]
    problem = Problem(from_dense(np.where(rng.random((256, 600)) < density, 1.0, 0)), 4096, H200)
    space = explored(problem)
    assert runs(problem, UnrolledPlans.of(space.survivors)).all()
    refused = [verdict for verdict in space.verdicts if verdict.constraint == "long_row_registers"]
    before = {verdict.tile for verdict in space.verdicts if verdict.constraint == "block_registers"}
    assert refused and not {verdict.tile for verdict in refused} & before


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
@given(shapes, st.integers(1, 5_000), st.sampled_from(sorted(DEVICES)), st.sampled_from([(1,), SPLITS]))
def test_verdicts_and_survivors_are_the_space_and_survivors_satisfy_every_constraint(
    shape: tuple[int, int, float, int], n: int, device: str, splits: tuple[int, ...]
) -> None:
    problem = Problem(random_matrix(*shape), n, DEVICES[device])
    space = explored(problem, splits)
    survivors = {survivor.tile for survivor in space.survivors}
    refused = {verdict.tile for verdict in space.verdicts}
    assert survivors | refused == set(tile_sizes(problem)) and not survivors & refused
    assert len(survivors) + len(space.verdicts) == space.size == len(tile_sizes(problem))
    assert survivors, "rules of thumb are moved rather than refuse every tile size"
    subject = Subject(problem, UnrolledPlans.of(space.survivors), splits)
    for constraint in CONSTRAINTS:
        assert constraint.check(subject).holds.all() or constraint.name in space.relaxed
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
    space = explored(problem)
    widened = list(widen(problem, space))
    assert any(one.schedule.prefetch == DEEP for one in widened)
    for survivor in space.survivors[::97]:
        mine = [c for c in widened if c.tile == survivor.tile]
        fits = [
            prefetch
            for prefetch in (*PREFETCHES, *([DEEP] if survivor.tile.cols <= DEEP_THREADS else []))
            if all(
                holds(problem, constraint, replace(survivor, schedule=Schedule(prefetch)))
                for constraint in CONSTRAINTS
                if constraint.stage == "registers"
            )
        ]
        assert [c.schedule.prefetch for c in mine if c.schedule.column_group == 1] == fits
        assert all(isinstance(c, UnrolledPlan) and c.tiling is survivor.tiling for c in mine)


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(1, 5_000), st.sampled_from(("h200", "rtx2080ti")))
def test_a_survivor_is_shared_by_as_many_blocks_as_are_of_use(
    shape: tuple[int, int, float, int], n: int, device: str
) -> None:
    problem = Problem(random_matrix(*shape), n, DEVICES[device])
    space, whole = explored(problem, SPLITS), explored(problem)
    found: dict[TileSize, set[int]] = {survivor.tile: set() for survivor in space.survivors}
    for candidate in widen(problem, space):
        found[candidate.tile].add(candidate.schedule.split_k)
    if not whole.relaxed:  # then more blocks can only let more tile sizes live
        assert {survivor.tile for survivor in whole.survivors} <= set(found)
    least = space.least_blocks
    for survivor in space.survivors:
        tile, alone = survivor.tile, survivor.tiling.block_rows * -(-n // survivor.tile.cols)
        schedules = {split: Schedule(PREFETCHES[0], split_k=split) for split in SPLITS}
        fits = {
            split
            for split, schedule in schedules.items()
            if forecast_registers(tile.rows, schedule, problem.device) <= problem.device.registers_per_thread
            and (split - 1) * -(-tile.rows // split) * tile.cols * 4 <= problem.device.shared_bytes_per_block
        }
        tiles = survivor.tiling.count * -(-n // tile.cols)  # without the blocks of empty rows
        useful = {s for s in fits if alone * s >= least and (s == 1 or tiles * s / 2 < problem.device.sms)}
        assert found[tile] == useful and useful


def test_fewer_tiles_are_enough_where_blocks_share_them() -> None:
    # 16 tiles of 32 rows, 4 blocks of 512 columns: 64 of 132 SMs, one tile size too large; 4 blocks a tile give 256.
    problem = Problem(random_matrix(512, 512, 0.1, 5), 2048, H200)
    tile = TileSize(32, 512)
    refused = {verdict.tile: verdict for verdict in explored(problem).verdicts}
    assert (refused[tile].constraint, refused[tile].value, refused[tile].limit) == ("idle_sms", 64, 66)
    space = explored(problem, SPLITS)
    found = {c.schedule.split_k for c in widen(problem, space) if c.tile == tile}
    assert found == {2, 4}  # 128 blocks, then 256: with those every SM has one, so that 8 would be too many
    assert {c.schedule.split_k for c in widen(problem, explored(problem))} == {1}


def test_blocks_share_a_tile_in_machine_code_alone() -> None:
    assert (splits_of("sass"), splits_of("ptx"), splits_of("cuda")) == (SPLITS, (1,), (1,))


def test_the_forecast_counts_accumulators_buffers_and_reserve_in_whole_units() -> None:
    assert forecast_registers(32, Schedule(16), H200) == 64  # 32 + 16 + 16
    assert forecast_registers(33, Schedule(16), H200) == 72
    assert forecast_registers(223, Schedule(16), H200) == 255  # a unit more would be 256, which no thread can address
    assert forecast_registers(224, Schedule(16), H200) > H200.registers_per_thread
    assert forecast_registers(29, Schedule(16, split_k=4), H200) == 64  # and three for the mailboxes
    assert forecast_registers(30, Schedule(16, split_k=2), H200) == 72


def test_a_b_too_wide_for_groups_of_columns_takes_all_of_them_together() -> None:
    problem = Problem(random_matrix(64, 64, 0.1, 3), 70_000_000, H200)
    space = explored(problem)
    assert space.survivors
    first = replace(space, survivors=space.survivors[:1])
    assert {wider.schedule.column_group for wider in widen(problem, first)} == {0}


def test_very_many_rows_are_named_in_steps_and_dispatched_in_few_tiles() -> None:
    rows = 40_000
    tall = from_coo((rows, 512), np.arange(rows), np.arange(rows) % 512, np.ones(rows))
    problem = Problem(tall, 64, H200)
    heights = sorted({tile.rows for tile in tile_sizes(problem)})
    assert heights[:3] == [1, 5, 9]
    tiles = UnrolledPlans.of_tiles([TileSize(height, 64) for height in heights[:4]], SHALLOWEST)
    bound = dispatched_tiles(Subject(problem, tiles))
    assert bound.holds.tolist() == [False, False, False, True]  # 40,000 / 9 is more than 4,096
