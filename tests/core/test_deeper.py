"""More loads in flight than the space has: which candidates take them."""

from lospmm.candidates import Candidates, ceil_divs
from lospmm.constraints import runs
from lospmm.deeper import PREFETCHES, deepened
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
