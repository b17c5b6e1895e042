"""Choosing by time: on landscapes that are made up, with trials that only look times up."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.errors import GpuFault
from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import Timing
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import SPLITS, Problem
from lospmm.space.candidates import UnrolledPlan, UnrolledPlans
from lospmm.space.constraints import CONSTRAINTS, HARDWARE, Subject, block_counts
from lospmm.space.estimate import estimate_micros
from lospmm.stages import Stages
from lospmm.tuning.race import choose_by_time
from lospmm.tuning.search import POLICY, Choice, Policy, search
from lospmm.tuning.surrogate import Pool
from lospmm.tuning.trial import Clock, Trials
from tests.space.test_explore import random_matrix

H200 = DEVICES["h200"]
PROBLEM = Problem(random_matrix(64, 96, 0.2, seed=0), 20_000, H200)
LOCKSTEPS = (128, 0)


def chosen_without(shortlist_size: int = 3) -> Choice:
    return search(PROBLEM, estimate_micros, shortlist_size, Stages(), lockstep=LOCKSTEPS[0], splits=SPLITS)


CHOICE = chosen_without()
POOL = Pool.of(PROBLEM, CHOICE.space, estimate_micros, LOCKSTEPS)


def key(candidate: UnrolledPlan) -> tuple[int, ...]:
    schedule = candidate.schedule
    axes = schedule.prefetch, schedule.column_group, schedule.lockstep, schedule.split_k
    return (*candidate.tile, *axes, schedule.walks)


class Landscape:
    """Trials that look times up; None is a kernel that fails. Every candidate that was asked for is written down."""

    def __init__(self, micros: Callable[[UnrolledPlan], float | None]) -> None:
        self.micros = micros
        self.asked: list[UnrolledPlan] = []

    def __call__(self, candidates: Sequence[UnrolledPlan]) -> Iterator[Measurement]:
        for candidate in candidates:
            self.asked.append(candidate)
            micros = self.micros(candidate)
            if micros is None:
                yield Measurement(None, None, "CUDA_ERROR_ILLEGAL_ADDRESS")
            else:
                yield Measurement(Timing(micros, 0.01, 15), 1e-7, None)


def never() -> bool:
    return False


def choose(
    trials: Trials, choice: Choice = CHOICE, *, finals: Trials | None = None, is_over: Callable[[], bool] = never
) -> Choice:
    clock = Clock(trials, finals, is_over)
    return choose_by_time(PROBLEM, choice, estimate_micros, clock, Stages(), locksteps=LOCKSTEPS)


def asked_first(choice: Choice = CHOICE) -> list[UnrolledPlan]:
    """The shortlist as it is timed."""
    clock = Landscape(lambda _: 1.0)
    choose(clock, choice)
    return clock.asked[: len(choice.shortlist)]


def test_the_shortlist_is_timed_first_with_every_lockstep_in_turn() -> None:
    first = asked_first(chosen_without(8))
    shortlist = [scored.candidate for scored in chosen_without(8).shortlist]
    assert [one.tile for one in first] == [one.tile for one in shortlist]
    assert [one.schedule.lockstep for one in first] == [128, 0] * 4
    assert [replace(one.schedule, lockstep=128) for one in first] == [one.schedule for one in shortlist]


@pytest.mark.parametrize("axis", ["lockstep", "prefetch", "split_k", "column_group"])
@pytest.mark.parametrize("place", [0, -1])
def test_it_learns_what_the_estimate_does_not_know(axis: str, place: int) -> None:
    """Where one value of an axis makes every kernel a fifth faster, what is built is near the best of all."""
    values = sorted({getattr(schedule, axis) for part in POOL.candidates for schedule in part.schedules})

    def micros(candidates: Sequence[UnrolledPlan]) -> np.ndarray:
        good = np.array([getattr(candidate.schedule, axis) == values[place] for candidate in candidates])
        return np.where(good, 0.8, 1.0) * estimate_micros(PROBLEM, candidates)

    found = choose(Landscape(lambda candidate: float(micros([candidate])[0])))
    best = min(float(micros(part).min()) for part in POOL.candidates)
    assert micros([found.winner])[0] <= 1.02 * best
    others = min(float(estimate_micros(PROBLEM, part).min()) for part in POOL.candidates)
    assert getattr(found.winner.schedule, axis) == values[place] or best > 0.98 * others


def test_it_finds_a_valley_that_the_estimate_does_not_lead_to() -> None:
    """Low tiles are twice as fast as estimated; of all that is looked at, little is faster in the end."""

    def micros(candidates: Sequence[UnrolledPlan]) -> np.ndarray:
        low = np.array([candidate.tile.rows <= 16 for candidate in candidates])
        return np.where(low, 0.5, 1.0) * estimate_micros(PROBLEM, candidates)

    clock = Landscape(lambda candidate: float(micros([candidate])[0]))
    found = choose(clock)
    everything = np.concatenate([micros(part) for part in POOL.candidates])
    assert found.winner.tile.rows <= 16
    assert micros([found.winner])[0] <= np.quantile(everything, 0.002)


WAVES = Problem(random_matrix(3000, 40, 0.2, 0), 4096, H200)


def waves_micros(candidate: UnrolledPlan) -> float:
    """Those that walk their code twice are fastest."""
    return (0.5 if candidate.schedule.walks > 1 else 1.0) * float(estimate_micros(WAVES, [candidate])[0])


def test_what_comes_last_is_built_while_the_last_rounds_are_timed() -> None:
    timed: list[UnrolledPlan] = []
    begun_after: list[int] = []

    def trials(candidates: Sequence[UnrolledPlan]) -> Iterator[Measurement]:
        if any(one.schedule.walks > 1 for one in candidates):
            begun_after.append(len(timed))
        return running(candidates)

    def running(candidates: Sequence[UnrolledPlan]) -> Iterator[Measurement]:
        for one in candidates:
            timed.append(one)
            yield Measurement(Timing(waves_micros(one), 0.01, 15), 1e-7, None)

    choice = search(WAVES, estimate_micros, 3, Stages(), splits=(1, 2))
    found = choose_by_time(WAVES, choice, estimate_micros, Clock(trials), Stages())
    rounds = len(choice.shortlist) + POLICY.rounds * POLICY.batch
    assert begun_after == [rounds - POLICY.ahead * POLICY.batch]
    assert len({key(one) for one in timed}) == len(timed)
    assert found.winner in timed[rounds:]


def test_where_blocks_come_in_waves_some_walk_their_code_twice() -> None:
    """Of machine code alone, which is what has clusters."""

    def chosen(splits: tuple[int, ...], policy: Policy = POLICY) -> tuple[UnrolledPlan, list[UnrolledPlan]]:
        choice, clock = search(WAVES, estimate_micros, 3, Stages(), splits=splits), Landscape(waves_micros)
        found = choose_by_time(WAVES, choice, estimate_micros, Clock(clock), Stages(), policy=policy)
        return found.winner, [candidate for candidate in clock.asked if candidate.schedule.walks > 1]

    winner, asked = chosen((1, 2))
    assert winner.schedule.walks == 2
    assert winner in asked
    assert 1 < len(asked) <= POLICY.walked
    assert chosen((1,))[1] == []
    assert chosen((1, 2), replace(POLICY, walked=0))[1] == []


def test_they_are_timed_too_where_there_is_little_else() -> None:
    """Rounds end before all of them were had; what comes last is timed all the same."""
    choice, clock = search(WAVES, estimate_micros, 3, Stages(), splits=(1, 2)), Landscape(waves_micros)
    pool = Pool.of_these(WAVES, UnrolledPlans.of([one.candidate for one in choice.shortlist]), estimate_micros, (0,))
    found = choose_by_time(WAVES, choice, estimate_micros, Clock(clock), Stages(), pool=pool)
    assert found.winner.schedule.walks == 2
    assert len(clock.asked) <= len(choice.shortlist) + POLICY.walked


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 10_000))
def test_the_winner_is_the_fastest_timed_and_nothing_is_timed_twice(seed: int) -> None:
    def micros(candidate: UnrolledPlan) -> float | None:
        drawn = np.random.default_rng([seed, *key(candidate)])
        return None if drawn.random() < 0.2 else 1 + drawn.random()

    clock = Landscape(micros)
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
    assert len(clock.asked) <= len(CHOICE.shortlist) + POLICY.rounds * POLICY.batch + POLICY.walked
    tilings = {survivor.tile: survivor.tiling for survivor in CHOICE.space.survivors}
    for candidate in clock.asked:
        assert candidate.tiling is tilings[candidate.tile]
        assert holds(PROBLEM, candidate)
        assert candidate.schedule.lockstep in LOCKSTEPS


def test_the_same_times_lead_the_same_way() -> None:
    def micros(candidate: UnrolledPlan) -> float:
        return 1 + np.random.default_rng(list(key(candidate))).random()

    first, second = Landscape(micros), Landscape(micros)
    assert key(choose(first).winner) == key(choose(second).winner)
    assert [key(one) for one in first.asked] == [key(one) for one in second.asked]


def test_a_space_of_few_is_timed_whole() -> None:
    problem = Problem(random_matrix(2, 3, 0.9, seed=0), 32, H200)
    choice = search(problem, estimate_micros, 3, Stages(), lockstep=128)
    clock = Landscape(lambda _: 1.0)
    policy = replace(POLICY, walked=0)
    choose_by_time(problem, choice, estimate_micros, Clock(clock), Stages(), locksteps=LOCKSTEPS, policy=policy)
    pool = Pool.of(problem, choice.space, estimate_micros, LOCKSTEPS)
    assert len(clock.asked) == min(len(pool.forecast), POLICY.rounds * POLICY.batch + 3)


def test_a_ranker_s_order_is_the_forecast() -> None:
    """Its scores are numbers of any kind; the forecast is in microseconds."""

    def backwards(problem: Problem, candidates: Sequence[UnrolledPlan]) -> np.ndarray:
        return -estimate_micros(problem, candidates)

    pool = Pool.of(PROBLEM, CHOICE.space, backwards, (128,))
    (part,) = pool.candidates
    scores, estimates = backwards(PROBLEM, part), estimate_micros(PROBLEM, part)
    assert np.all(np.diff(pool.forecast[np.argsort(scores, kind="stable")]) >= -1e-12) and np.ptp(pool.forecast) > 0
    assert pool.forecast.min() < np.log(estimates).min() + np.log(2.3)


def test_rounds_are_built_ahead() -> None:
    """As many as the policy says are begun when one is timed."""
    events: list[tuple[str, int]] = []

    class Watched:
        def __init__(self, candidates: Sequence[UnrolledPlan]) -> None:
            self.number, self.left = len([e for e in events if e[0] == "begun"]), len(candidates)
            events.append(("begun", self.number))

        def __iter__(self) -> Iterator[Measurement]:
            return self

        def __next__(self) -> Measurement:
            if not self.left:
                raise StopIteration
            self.left -= 1
            events.append(("timed", self.number))
            return Measurement(Timing(1.0, 0.01, 15), 1e-7, None)

        def close(self) -> None:
            events.append(("closed", self.number))

    choose(Watched)
    for number in range(POLICY.rounds):
        assert events.index(("begun", number + POLICY.ahead)) < events.index(("timed", number))
    begun = [number for what, number in events if what == "begun"]
    assert sorted(number for what, number in events if what == "closed") == begun


def test_the_seconds_of_choosing_are_counted() -> None:
    parts: list[str] = []

    class Counted(Stages):
        def part(self, name: str) -> AbstractContextManager[None]:
            parts.append(name)
            return super().part(name)

    clock = Clock(Landscape(lambda candidate: float(candidate.tile.rows)))
    choose_by_time(PROBLEM, CHOICE, estimate_micros, clock, Counted(), locksteps=LOCKSTEPS)
    assert parts == ["rank"] * (1 + POLICY.rounds)


def test_the_shortlist_has_the_best_of_each_split() -> None:
    assert {scored.candidate.schedule.split_k for scored in chosen_without(8).shortlist} == set(SPLITS)


def test_kernels_that_fail_are_skipped() -> None:
    last = key(asked_first()[-1])
    clock = Landscape(lambda candidate: 5.0 if key(candidate) == last else None)
    found = choose(clock)
    assert key(found.winner) == last
    assert sum(trial.measurement.failure is not None for trial in found.trials) == len(found.trials) - 1
    assert all(trial.micros == float("inf") for trial in found.trials if trial.measurement.failure)


def test_where_all_fail_there_is_a_fault() -> None:
    clock = Landscape(lambda _: None)
    with pytest.raises(GpuFault, match=rf"none of {len(CHOICE.shortlist)} kernels ran: CUDA_ERROR_ILLEGAL_ADDRESS"):
        choose(clock)
    assert len(clock.asked) == len(CHOICE.shortlist)


def test_time_that_is_up_ends_it_after_what_is_timed() -> None:
    clock = Landscape(lambda _: 1.0)
    found = choose(clock, finals=clock, is_over=lambda: True)
    assert len(found.trials) == len(clock.asked) == 1
    assert found.trials[0].final_micros is None
    clock = Landscape(lambda _: 1 / len(clock.asked))  # each faster: it would go on
    found = choose(clock, finals=clock, is_over=lambda: len(clock.asked) >= 5)
    assert len(found.trials) == len(clock.asked) == 5
    assert found.winner is clock.asked[-1]


def test_it_waits_for_the_first_that_runs() -> None:
    last = key(asked_first()[-1])
    clock = Landscape(lambda candidate: 5.0 if key(candidate) == last else None)
    assert key(choose(clock, is_over=lambda: True).winner) == last


def test_the_fastest_are_timed_again_in_turns() -> None:
    """And the median decides: one that was fast by chance does not win."""
    lucky, steady = (key(candidate) for candidate in asked_first()[:2])
    once = Landscape(lambda candidate: {lucky: 1.0, steady: 2.0}.get(key(candidate), 3.0))
    again = Landscape(lambda candidate: {lucky: 2.2, steady: 2.0}.get(key(candidate), 9.0))
    found = choose(once, finals=again)
    assert key(found.winner) == steady
    asked = [key(candidate) for candidate in again.asked]
    first, *later = turns(asked)
    assert first[:2] == [lucky, steady]
    assert all(turn == [steady, lucky, *first[2:]][: len(turn)] for turn in later)  # the slowest drop out
    counts = {key(trial.candidate): len(trial.finals) for trial in found.trials if trial.finals}
    assert counts == Counter(asked)
    assert next(trial for trial in found.trials if key(trial.candidate) == lucky).final_micros == 2.2


def turns(asked: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """What was asked for in the end, by turns."""
    assert len(asked) == sum(POLICY.finals)
    return [asked[end - count : end] for count, end in zip(POLICY.finals, accumulate(POLICY.finals), strict=True)]


def test_one_that_is_fast_at_times_loses_to_a_steady_one() -> None:
    """Of some kernels every load takes another time: most of those that look fastest were lucky."""
    steady, *erratic = dict.fromkeys(key(candidate) for candidate in asked_first())
    once = Landscape(lambda candidate: {steady: 2.0, **dict.fromkeys(erratic, 1.9)}.get(key(candidate), 9.0))
    loads = {one: iter((1.9, 2.3, 2.4, 1.9, 2.4, 2.3)[at % 2 :]) for at, one in enumerate(erratic)}
    steadily = {steady: 2.0}
    again = Landscape(lambda one: next(loads[key(one)]) if key(one) in loads else steadily.get(key(one), 9.0))
    assert 1 < len(erratic) < POLICY.finals[0]
    assert key(choose(once, finals=again).winner) == steady


def test_a_turn_that_time_cuts_short_does_not_count() -> None:
    once, again, first = Landscape(lambda _: 1.0), Landscape(lambda _: 2.0), POLICY.finals[0]
    found = choose(once, finals=again, is_over=lambda: len(again.asked) > first)
    assert len(again.asked) == first + 1
    assert {len(trial.finals) for trial in found.trials} == {0, 1}

    def cut(candidates: Sequence[UnrolledPlan]) -> Iterator[Measurement]:
        return iter(list(again(candidates))[: first if len(candidates) == first else 1])

    assert {len(trial.finals) for trial in choose(once, finals=cut).trials} == {0, 1}


def test_one_that_fails_in_the_end_is_not_taken() -> None:
    racy = key(asked_first()[0])
    once = Landscape(lambda candidate: 1.0 if key(candidate) == racy else 2.0)
    turns = iter(range(1000))
    again = Landscape(lambda candidate: None if key(candidate) == racy and next(turns) == 1 else 1.5)
    found = choose(once, finals=again)
    assert key(found.winner) != racy
    with pytest.raises(GpuFault, match=f"the fastest {POLICY.finals[0]} kernels ran again: CUDA_ERROR_ILLEGAL_ADDRESS"):
        choose(once, finals=Landscape(lambda _: None))


def test_the_trials_may_give_up_early() -> None:
    def two(candidates: Sequence[UnrolledPlan]) -> Iterable[Measurement]:
        return [Measurement(Timing(1.0, 0.0, 15), 0.0, None) for _ in candidates[:2]]

    found = choose(two)
    assert len(found.trials) >= 2
    assert found.trials[0].candidate is CHOICE.shortlist[0].candidate


def holds(problem: Problem, candidate: UnrolledPlan) -> bool:
    candidates, space = UnrolledPlans.of([candidate]), CHOICE.space
    subject = Subject(problem, candidates)
    checks = [*HARDWARE, *(one.check for one in CONSTRAINTS if one.name not in {"idle_sms", *space.relaxed})]
    enough = block_counts(problem, candidates) >= space.least_blocks
    return all(bool(check(subject).holds.all()) for check in checks) and bool(enough.all())
