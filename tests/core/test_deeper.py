"""More loads in flight than the space has, or than its steps leave: which candidates take them."""

from dataclasses import replace

from lospmm.candidates import Candidates, ceil_divs
from lospmm.constraints import runs
from lospmm.deeper import PREFETCHES, STEP, deepened, filled
from lospmm.device import DEVICES
from lospmm.estimate import work_of
from lospmm.model import Candidate, Problem, Schedule, TileSize
from lospmm.reorder import natural_order
from tests.emulated.drawn import random_matrix

PROBLEM = Problem(random_matrix(512, 1000, 0.02), 256, DEVICES["h200"])


def candidate_of(rows: int, cols: int, prefetch: int, **axes: int) -> Candidate:
    return Candidate(TileSize(rows, cols), Schedule(prefetch, **axes), natural_order(PROBLEM.matrix, rows))


def test_tiles_of_few_rows_have_registers_left() -> None:
    found = deepened(PROBLEM, [candidate_of(12, 256, 72)])  # some 215 columns
    assert [one.schedule.prefetch for one in found] == [200, 144, 104] == sorted(PREFETCHES, reverse=True)
    assert {one.tile for one in found} == {TileSize(12, 256)}


def test_no_more_are_in_flight_than_are_loaded() -> None:
    assert [one.schedule.prefetch for one in deepened(PROBLEM, [candidate_of(6, 256, 72)])] == [144, 104]
    assert deepened(PROBLEM, [candidate_of(2, 256, 72)]) == []


def test_no_more_waves_of_blocks() -> None:
    """The same grid, as often as before on the GPU at a time, and with registers that a thread has."""
    asked = [candidate_of(rows, cols, 72) for rows in (4, 16, 48, 100) for cols in (64, 128, 256)]
    deeper = 0
    for one in asked:
        every = Candidates.of([one, *deepened(PROBLEM, [one])])
        work = work_of(PROBLEM, every)
        assert runs(PROBLEM, every).all() and len(set(ceil_divs(work.blocks, work.resident).tolist())) == 1
        deeper += len(every) - 1
    assert deeper > len(asked) / 2


def test_two_that_lead_to_the_same_are_one() -> None:
    found = deepened(PROBLEM, [candidate_of(12, 256, 72), candidate_of(12, 256, 48)])
    assert len(found) == len(PREFETCHES)
    assert deepened(PROBLEM, []) == []


def test_what_a_step_of_the_space_leaves_is_filled() -> None:
    """384 threads have 168 registers each, beside 124 sums too few for 32 loads in flight."""
    [found] = filled(PROBLEM, [candidate_of(124, 384, 24)])
    assert (found.tile, found.schedule) == (TileSize(124, 384), Schedule(28))
    assert filled(PROBLEM, [found]) == filled(PROBLEM, [candidate_of(124, 384, 16)]) == []


def test_only_where_the_next_step_does_not_fit() -> None:
    asked = [
        candidate_of(rows, cols, depth) for rows in (12, 64, 110) for cols in (128, 256, 384) for depth in (24, 72)
    ]
    seen = 0
    for one in asked:
        own, found = one.schedule.prefetch, filled(PROBLEM, [one])
        for full in found:
            more = replace(full, schedule=replace(full.schedule, prefetch=full.schedule.prefetch + STEP))
            every = Candidates.of([one, full, more])
            work = work_of(PROBLEM, every)
            waves = ceil_divs(work.blocks, work.resident.clip(1))
            assert own < full.schedule.prefetch < {24: 32, 72: PREFETCHES[0]}[own]
            assert waves[0] == waves[1] and runs(PROBLEM, every)[:2].all()
            assert waves[2] > waves[0] or not runs(PROBLEM, every)[2], "there was room for more"
            assert not deepened(PROBLEM, [one])
            seen += 1
    assert seen
