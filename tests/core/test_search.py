"""Choosing by time: on landscapes that are made up, with trials that only look times up."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.candidates import Candidates
from lospmm.constraints import CONSTRAINTS, HARDWARE, Subject, block_counts
from lospmm.device import DEVICES
from lospmm.errors import GpuFault
from lospmm.estimate import estimate_micros
from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import Timing
from lospmm.model import COLUMN_GROUPS, SPLITS, Candidate, Problem, Schedule
from lospmm.search import NEIGHBOURS, PATIENCE, ROUNDS, Choice, Trials, choose_by_time, search
from lospmm.space import PREFETCHES, neighbours
from lospmm.stages import Stages
from tests.core.test_space import random_matrix

H200 = DEVICES["h200"]
PROBLEM = Problem(random_matrix(64, 96, 0.2, seed=0), 20_000, H200)
LOCKSTEPS = (128, 0)


def chosen_without(shortlist_size: int = 3) -> Choice:
    return search(PROBLEM, estimate_micros, shortlist_size, Stages(), lockstep=LOCKSTEPS[0], splits=SPLITS)


CHOICE = chosen_without()


def key(candidate: Candidate) -> tuple[int, ...]:
    schedule = candidate.schedule
    return (*candidate.tile, schedule.prefetch, schedule.column_group, schedule.lockstep, schedule.split_k)


class Clock:
    """Trials that look times up; None is a kernel that fails. Every candidate that was asked for is written down."""

    def __init__(self, micros: Callable[[Candidate], float | None]) -> None:
        self.micros = micros
        self.asked: list[Candidate] = []

    def __call__(self, candidates: Sequence[Candidate]) -> Iterator[Measurement]:
        for candidate in candidates:
            self.asked.append(candidate)
            micros = self.micros(candidate)
            if micros is None:
                yield Measurement(None, None, "CUDA_ERROR_ILLEGAL_ADDRESS")
            else:
                yield Measurement(Timing(micros, 0.01, 15), 1e-7, None)


def choose(clock: Trials, choice: Choice = CHOICE, budget: float | None = None) -> Choice:
    return choose_by_time(PROBLEM, choice, estimate_micros, clock, locksteps=LOCKSTEPS, budget_seconds=budget)


def bowl(rows: int, prefetch: int) -> Callable[[Candidate], float]:
    """Fastest at these, slower the further away along each axis."""

    def micros(candidate: Candidate) -> float:
        depth = PREFETCHES.index(candidate.schedule.prefetch) - PREFETCHES.index(prefetch)
        lockstep = 1.0 * (candidate.schedule.lockstep != 0)
        return 10.0 + abs(candidate.tile.rows - rows) + abs(depth) + candidate.tile.cols / 1e4 + lockstep

    return micros


def test_it_climbs_to_the_best_of_a_bowl() -> None:
    """From the shortlist by steps of at most two tile sizes; the best lies within the rounds."""
    start = CHOICE.shortlist[0].candidate
    sizes = sorted({survivor.tile.rows for survivor in CHOICE.space.survivors})
    at = sizes.index(start.tile.rows)
    target = sizes[min(at + 4, len(sizes) - 1)]
    clock = Clock(bowl(target, start.schedule.prefetch))
    found = choose(clock)
    assert found.winner.tile.rows == target
    assert found.winner.schedule.lockstep == 0
    micros = [clock.micros(trial.candidate) for trial in found.trials]
    assert clock.micros(found.winner) == min(m for m in micros if m is not None)
    assert found.shortlist == CHOICE.shortlist and found.space is CHOICE.space


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_the_winner_is_the_fastest_timed_and_nothing_is_timed_twice(seed: int) -> None:
    def micros(candidate: Candidate) -> float | None:
        drawn = np.random.default_rng([seed, *key(candidate)])
        return None if drawn.random() < 0.2 else 1 + drawn.random()

    clock = Clock(micros)
    try:
        found = choose(clock)
    except GpuFault:
        assert all(micros(candidate) is None for candidate in clock.asked)
        assert len(clock.asked) == len(CHOICE.shortlist)
        return
    times = [micros(candidate) for candidate in clock.asked]
    assert micros(found.winner) == min(one for one in times if one is not None)
    assert [trial.candidate for trial in found.trials] == clock.asked
    assert len({key(candidate) for candidate in clock.asked}) == len(clock.asked)
    assert len(clock.asked) <= len(CHOICE.shortlist) + ROUNDS * NEIGHBOURS
    assert [key(c) for c in clock.asked[: len(CHOICE.shortlist)]] == [key(s.candidate) for s in CHOICE.shortlist]


def test_it_stops_where_it_has_found_nothing_faster_for_a_while() -> None:
    first = key(CHOICE.shortlist[0].candidate)
    clock = Clock(lambda candidate: 1.0 if key(candidate) == first else 2.0)
    found = choose(clock)
    assert key(found.winner) == first
    assert len(CHOICE.shortlist) < len(clock.asked) <= len(CHOICE.shortlist) + PATIENCE * NEIGHBOURS


def test_it_goes_on_from_the_next_fastest() -> None:
    """Where noise has put another first: what is faster still lies next to the second."""
    first, second = (scored.candidate for scored in CHOICE.shortlist[:2])
    beside = {key(c) for c in neighbours(PROBLEM, CHOICE.space, second, LOCKSTEPS)}
    beside -= {key(c) for c in neighbours(PROBLEM, CHOICE.space, first, LOCKSTEPS)}
    order = {key(first): 2.0, key(second): 2.1}
    clock = Clock(lambda candidate: order.get(key(candidate), 1.0 if key(candidate) in beside else 3.0))
    assert key(choose(clock).winner) in beside


def test_the_shortlist_has_the_best_of_each_split() -> None:
    assert {scored.candidate.schedule.split_k for scored in chosen_without(8).shortlist} == set(SPLITS)


def test_kernels_that_fail_are_skipped() -> None:
    last = key(CHOICE.shortlist[-1].candidate)
    clock = Clock(lambda candidate: 5.0 if key(candidate) == last else None)
    found = choose(clock)
    assert key(found.winner) == last
    assert sum(trial.measurement.failure is not None for trial in found.trials) == len(found.trials) - 1
    assert all(trial.micros == float("inf") for trial in found.trials if trial.measurement.failure)


def test_where_all_fail_there_is_a_fault() -> None:
    clock = Clock(lambda _: None)
    with pytest.raises(GpuFault, match=rf"none of {len(CHOICE.shortlist)} kernels ran: CUDA_ERROR_ILLEGAL_ADDRESS"):
        choose(clock)
    assert len(clock.asked) == len(CHOICE.shortlist)


def test_a_budget_ends_it_after_what_is_timed() -> None:
    def slow(_: Candidate) -> float:
        time.sleep(0.05)
        return 1.0

    clock = Clock(slow)
    found = choose(clock, budget=1e-9)
    assert len(found.trials) == len(clock.asked) == 1
    clock = Clock(lambda candidate: slow(candidate) / (1 + len(clock.asked)))  # each faster: it would go on
    found = choose(clock, budget=0.22)
    assert 2 <= len(found.trials) <= 6


def test_a_budget_waits_for_the_first_that_runs() -> None:
    last = key(CHOICE.shortlist[-1].candidate)
    clock = Clock(lambda candidate: 5.0 if key(candidate) == last else None)
    assert key(choose(clock, budget=1e-9).winner) == last


def test_the_trials_may_give_up_early() -> None:
    def two(candidates: Sequence[Candidate]) -> Iterable[Measurement]:
        return [Measurement(Timing(1.0, 0.0, 15), 0.0, None) for _ in candidates[:2]]

    found = choose(two)
    assert len(found.trials) >= 2
    assert found.trials[0].candidate is CHOICE.shortlist[0].candidate


def holds(problem: Problem, candidate: Candidate) -> bool:
    candidates, space = Candidates.of([candidate]), CHOICE.space
    subject = Subject(problem, candidates)
    checks = [*HARDWARE, *(one.check for one in CONSTRAINTS if one.name not in {"idle_sms", *space.relaxed})]
    enough = block_counts(problem, candidates) >= space.least_blocks
    return all(bool(check(subject).holds.all()) for check in checks) and bool(enough.all())


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_neighbours_fit_and_differ_along_one_axis(data: st.DataObject) -> None:
    survivors = CHOICE.space.survivors
    base = data.draw(st.sampled_from(survivors))
    schedule = Schedule(
        data.draw(st.sampled_from(PREFETCHES)),
        column_group=data.draw(st.sampled_from(COLUMN_GROUPS)),
        lockstep=data.draw(st.sampled_from(LOCKSTEPS)),
        split_k=data.draw(st.sampled_from(SPLITS)),
    )
    candidate = Candidate(base.tile, schedule, base.tiling)
    found = neighbours(PROBLEM, CHOICE.space, candidate, LOCKSTEPS)
    tiles = {survivor.tile: survivor.tiling for survivor in survivors}
    for near in found:
        assert sum(a != b for a, b in zip(key(near), key(candidate), strict=True)) == 1
        assert near.tiling is tiles[near.tile]
        assert holds(PROBLEM, near)
        assert near.schedule.lockstep in LOCKSTEPS
    assert len({key(near) for near in found}) == len(found)


def test_a_step_takes_half_or_twice_as_many_blocks_to_a_tile() -> None:
    # 2 tiles in 20 blocks of columns: 40 blocks are too few for 132 SMs, 80 and 160 are not, and 160 are enough.
    survivor = next(one for one in CHOICE.space.survivors if one.tile == (32, 1024))
    steps = {}
    for split in SPLITS:
        shared = Candidate(survivor.tile, Schedule(8, split_k=split), survivor.tiling)
        found = neighbours(PROBLEM, CHOICE.space, shared, LOCKSTEPS)
        steps[split] = {near.schedule.split_k for near in found} - {split}
    assert steps == {1: {2}, 2: {4}, 4: {2}, 8: {4}}


def test_steps_go_both_ways() -> None:
    """What is a neighbour has the candidate as its neighbour, so that a climb can turn back."""
    for scored in CHOICE.shortlist:
        start = scored.candidate
        for near in neighbours(PROBLEM, CHOICE.space, start, LOCKSTEPS):
            assert key(start) in {key(back) for back in neighbours(PROBLEM, CHOICE.space, near, LOCKSTEPS)}
