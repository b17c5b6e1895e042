"""What a search times last: candidates with axes that its space does not have."""

from dataclasses import replace

from lospmm.clock import Clock
from lospmm.device import DEVICES
from lospmm.estimate import estimate_micros
from lospmm.last_axes import LAST_AXES
from lospmm.model import Candidate, Problem
from lospmm.search import POLICY, Policy, choose_by_time, search
from lospmm.stages import Stages
from tests.core.test_search import PROBLEM, Landscape, choose, key
from tests.core.test_space import random_matrix


def test_the_fastest_are_timed_with_a_tile_of_each_wave_to_a_block() -> None:
    problem = Problem(random_matrix(3000, 40, 0.2, 0), 4096, DEVICES["h200"])
    choice = search(problem, estimate_micros, 3, Stages())

    def micros(candidate: Candidate) -> float:
        factor = 0.9 if candidate.schedule.tiles_per_block > 1 else 1.0
        return factor * float(estimate_micros(problem, [candidate])[0])

    clock = Landscape(micros)
    found = choose_by_time(problem, choice, estimate_micros, Clock(clock), Stages())
    assert found.winner.schedule.tiles_per_block > 1
    asked = [candidate for candidate in clock.asked if candidate.schedule.tiles_per_block > 1]
    early = [candidate for candidate in asked if candidate.schedule.stores_early]
    assert 0 < len(asked) - len(early) <= POLICY.last.chained
    assert [replace(one.schedule, stores_early=False) for one in early] == [asked[0].schedule]
    policy = replace(POLICY, last=replace(LAST_AXES, chained=0))
    without = choose_by_time(problem, choice, estimate_micros, Clock(Landscape(micros)), Stages(), policy=policy)
    assert without.winner.schedule.tiles_per_block == 1


def test_where_blocks_come_in_waves_some_walk_their_code_twice() -> None:
    """Of machine code alone, which is what has clusters."""
    problem = Problem(random_matrix(3000, 40, 0.2, 0), 4096, DEVICES["h200"])

    def micros(candidate: Candidate) -> float:
        return (0.5 if candidate.schedule.walks > 1 else 1.0) * float(estimate_micros(problem, [candidate])[0])

    def chosen(splits: tuple[int, ...], policy: Policy = POLICY) -> tuple[Candidate, list[Candidate]]:
        choice, clock = search(problem, estimate_micros, 3, Stages(), splits=splits), Landscape(micros)
        found = choose_by_time(problem, choice, estimate_micros, Clock(clock), Stages(), policy=policy)
        return found.winner, [candidate for candidate in clock.asked if candidate.schedule.walks > 1]

    winner, asked = chosen((1, 2))
    assert winner.schedule.walks == 2
    assert winner in asked
    assert 1 < len(asked) <= POLICY.last.walked
    assert chosen((1,))[1] == []
    assert chosen((1, 2), replace(POLICY, last=replace(LAST_AXES, walked=0)))[1] == []


def test_the_fastest_are_timed_with_rows_that_are_stored_early() -> None:
    def micros(candidate: Candidate) -> float:
        return (0.9 if candidate.schedule.stores_early else 1.0) * float(estimate_micros(PROBLEM, [candidate])[0])

    clock = Landscape(micros)
    found = choose(clock)
    early = [candidate for candidate in clock.asked if candidate.schedule.stores_early]
    assert found.winner.schedule.stores_early and len(early) == POLICY.last.early == len(set(map(key, early)))
    assert clock.asked[-len(early) :] == early and all(one.schedule.split_k == 1 for one in early)
