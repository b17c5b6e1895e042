"""Candidates as columns: the same candidates, the same figures, as one by one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.codegen.ir import grid, launch
from lospmm.codegen.lower import lower
from lospmm.matrix.csr import from_dense
from lospmm.problem.device import DEVICES, DeviceSpec
from lospmm.problem.problem import SPLITS, Problem
from lospmm.space.candidates import BARRIER_BYTES, COLUMN_GROUPS, Pool, Schedule, TileSize, UnrolledPlan, UnrolledPlans
from lospmm.space.constraints import Subject, block_counts, grid_height, mailbox_bytes
from lospmm.space.occupancy import resident_blocks
from lospmm.space.registers import forecast_of_each, forecast_registers
from lospmm.space.reorder import regroup

H200 = DEVICES["h200"]
DENSE = np.where(np.random.default_rng(7).random((70, 50)) < 0.2, 1.0, 0.0)
DENSE[60:] = 0  # rows without a nonzero
MATRIX = from_dense(DENSE)
TILINGS = regroup(MATRIX, range(1, 61))

schedules = st.builds(
    Schedule,
    prefetch=st.integers(1, 90),
    column_group=st.sampled_from(COLUMN_GROUPS),
    split_k=st.sampled_from(SPLITS),
)
candidates = st.builds(
    lambda rows, cols, schedule: UnrolledPlan(TileSize(rows, cols), schedule, TILINGS[rows]),
    rows=st.integers(1, 60),
    cols=st.sampled_from((32, 96, 1024)),
    schedule=schedules,
)
lists = st.lists(candidates, max_size=12)


@given(lists)
def test_columns_read_as_the_candidates_they_were_made_of(found: list[UnrolledPlan]) -> None:
    columns = UnrolledPlans.of(found)
    assert UnrolledPlans.of(columns) is columns
    for read in (list(columns), list(columns[:]), [columns[at] for at in range(len(found))]):
        assert [(c.tile, c.schedule, id(c.tiling)) for c in read] == [(c.tile, c.schedule, id(c.tiling)) for c in found]
    assert [c.tile for c in columns[::-2]] == [c.tile for c in found[::-2]]
    assert all(type(c.tile.rows) is int and type(c.tile.cols) is int for c in columns)  # written down as JSON
    with pytest.raises(IndexError):
        columns[len(found)]


def test_a_pool_finds_the_candidates_of_its_parts() -> None:
    tile, schedules = TileSize(7, 96), (Schedule(4), Schedule(8))
    parts = [UnrolledPlans.of([UnrolledPlan(tile, one, TILINGS[7])]) for one in schedules]
    pool = Pool(tuple(parts), np.zeros((2, 1)), np.zeros(2), np.zeros(2, np.int64))
    assert [pool.find(tile, one) for one in schedules] == [0, 1]
    assert [pool[at].schedule for at in (0, 1)] == list(schedules)
    assert pool.find(TileSize(8, 96), schedules[0]) is None and pool.find(tile, Schedule(5)) is None
    with pytest.raises(IndexError):
        pool[2]


@given(lists, st.lists(schedules, max_size=4))
def test_every_tile_size_is_given_every_schedule(found: list[UnrolledPlan], wanted: list[Schedule]) -> None:
    every = UnrolledPlans.of(found).with_each(wanted)
    expected = [(c.tile, schedule, c.tiling.size_limit) for c in found for schedule in wanted]
    assert [(c.tile, c.schedule, c.tiling.size_limit) for c in every] == expected


@given(lists, st.integers(1, 200_000_000))
def test_figures_are_those_of_each(found: list[UnrolledPlan], n: int) -> None:
    problem, columns = Problem(MATRIX, n, H200), UnrolledPlans.of(found)
    registers = [forecast_registers(c.tile.rows, c.schedule, H200) for c in found]
    assert forecast_of_each(problem, columns).tolist() == registers
    parts = [c.tiling.block_rows * c.schedule.split_k for c in found]
    blocks = [part * -(-n // c.tile.cols) for part, c in zip(parts, found, strict=True)]
    assert block_counts(problem, columns).tolist() == blocks
    grids = [grid(y, n, c.tile.cols, c.schedule.column_group) for y, c in zip(parts, found, strict=True)]
    assert grid_height(Subject(problem, columns)).value.tolist() == [max(y, z) for _, y, z in grids]


@settings(max_examples=40, deadline=None)
@given(candidates)
def test_a_program_has_the_blocks_and_at_most_the_mailbox_of_its_candidate(candidate: UnrolledPlan) -> None:
    problem, columns = Problem(MATRIX, 4096, H200), UnrolledPlans.of([candidate])
    shape = launch(lower(problem, candidate))
    height = grid_height(Subject(problem, columns)).value[0]
    assert height == max(shape.grid[1:])
    assert shape.shared_bytes <= mailbox_bytes(Subject(problem, columns)).value[0]


def test_a_full_tile_needs_the_whole_mailbox() -> None:
    matrix = from_dense(np.ones((30, 16)))
    tiling = regroup(matrix, [30])[30]
    problem = Problem(matrix, 4096, H200)
    for split in SPLITS:
        candidate = UnrolledPlan(TileSize(30, 64), Schedule(8, split_k=split), tiling)
        bound = mailbox_bytes(Subject(problem, UnrolledPlans.of([candidate])))
        rows = -(-30 // split)
        needed = (split - 1) * rows * 64 * 4 + BARRIER_BYTES * (split > 1)
        assert bound.value.tolist() == [launch(lower(problem, candidate)).shared_bytes] == [needed]
    small = replace(problem, device=replace(H200, shared_bytes_per_block=7 * 4 * 64 * 4 + BARRIER_BYTES))
    shared = [UnrolledPlan(TileSize(rows, 64), Schedule(8, split_k=8), tiling) for rows in (32, 33)]
    assert mailbox_bytes(Subject(small, UnrolledPlans.of(shared))).holds.tolist() == [True, False]


@given(
    st.sampled_from(sorted(DEVICES.values(), key=lambda device: device.name)),
    st.lists(st.tuples(st.integers(1, 1100), st.integers(1, 260), st.integers(0, 250_000)), max_size=8),
)
def test_resident_blocks_are_those_of_each(device: DeviceSpec, launches: list[tuple[int, int, int]]) -> None:
    threads, registers, shared = np.array(launches, dtype=np.int64).reshape(-1, 3).T
    together = resident_blocks(device, threads=threads, registers_per_thread=registers, shared_bytes=shared)
    alone = [
        resident_blocks(device, threads=one, registers_per_thread=per_thread, shared_bytes=asked)
        for one, per_thread, asked in launches
    ]
    assert together.tolist() == alone
