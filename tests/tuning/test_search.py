"""The race of unrolled kernels: on landscapes that are made up, timed by a runner that only looks times up."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.errors import GpuFault
from lospmm.families.candidate import Candidate
from lospmm.gpu.messages import Measurement
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import SPLITS, Problem
from lospmm.space.candidates import Pool, UnrolledPlan, UnrolledPlans
from lospmm.space.constraints import CONSTRAINTS, HARDWARE, Subject, block_counts
from lospmm.space.estimate import estimate_micros
from lospmm.space.pool import pool_of_space
from lospmm.stages import Stages
from lospmm.tuning import unrolled
from lospmm.tuning.forecast import winner_of
from lospmm.tuning.known import Choice, Known
from lospmm.tuning.options import Options
from lospmm.tuning.race import POLICIES, race_unrolled
from lospmm.tuning.trial import Trial, fastest_first
from lospmm.tuning.unrolled import search
from tests.fixtures.lookup_runner import FAILURE, LookupRunner, Micros
from tests.space.test_explore import random_matrix

H200 = DEVICES["h200"]
PROBLEM = Problem(random_matrix(48, 60, 0.2, seed=0), 12_000, H200)
OPTIONS = Options(emitter="sass", ranker="none", measure="gpu")
FULL = POLICIES["full"]


@cache
def choice_of(shortlist_size: int = 3) -> Choice:
    return search(PROBLEM, estimate_micros, shortlist_size, Stages(), splits=SPLITS)


@cache
def pool() -> Pool:
    return pool_of_space(PROBLEM, choice_of().space, estimate_micros)


@cache
def first() -> list[Candidate]:
    """The shortlist as it is timed."""
    runner = LookupRunner(lambda _: 1.0)
    raced(runner)
    return runner.asked[: len(choice_of().shortlist)]


def raced(runner: LookupRunner, known: Known | None = None, stages: Stages | None = None) -> Known:
    known = known or Known((), {}, choice=choice_of(), pool=pool())
    return race_unrolled(PROBLEM, known, OPTIONS, runner, stages or Stages(), FULL)


def won(runner: LookupRunner) -> Candidate:
    return winner_of(PROBLEM, raced(runner), "sass")


def by_plans(micros: Callable[[Sequence[UnrolledPlan]], np.ndarray]) -> LookupRunner:
    return LookupRunner(lambda candidate: float(micros([candidate.plan])[0]))


def drawn(candidate: Candidate, seed: int = 0) -> np.random.Generator:
    """Chance that is the same for a candidate whenever it is asked."""
    tile, schedule = candidate.plan.tile, candidate.plan.schedule
    axes = schedule.prefetch, schedule.column_group, schedule.split_k
    return np.random.default_rng([seed, *tile, *axes])


def only(micros: dict[Candidate, float], others: float | None) -> Micros:
    return lambda candidate: micros.get(candidate, others)


def test_the_shortlist_is_timed_first() -> None:
    choice, runner = choice_of(8), LookupRunner(lambda _: 1.0)
    found = raced(runner, Known((), {}, choice=choice))
    assert runner.asked[:8] == list(choice.shortlist)
    assert found.choice is not None and list(found.choice.shortlist) == runner.asked[:8]
    assert {one.plan.schedule.split_k for one in choice.shortlist} == set(SPLITS)


@pytest.mark.parametrize("axis", ["prefetch", "split_k", "column_group"])
@pytest.mark.parametrize("place", [0, -1])
def test_it_learns_what_the_estimate_does_not_know(axis: str, place: int) -> None:
    """Where one value of an axis makes every kernel a fifth faster, what is built is near the best of all."""
    values = sorted({getattr(schedule, axis) for part in pool().candidates for schedule in part.schedules})

    def micros(candidates: Sequence[UnrolledPlan]) -> np.ndarray:
        every = UnrolledPlans.of(candidates)
        shares = np.array([0.8 if getattr(one, axis) == values[place] else 1.0 for one in every.schedules])
        return shares[every.schedule] * estimate_micros(PROBLEM, every)

    winner = won(by_plans(micros)).plan
    best = min(float(micros(part).min()) for part in pool().candidates)
    assert micros([winner])[0] <= 1.02 * best
    others = min(float(estimate_micros(PROBLEM, part).min()) for part in pool().candidates)
    assert getattr(winner.schedule, axis) == values[place] or best > 0.98 * others


def test_it_finds_a_valley_that_the_estimate_does_not_lead_to() -> None:
    """Low tiles are twice as fast as estimated; of all that is looked at, little is faster in the end."""

    def micros(candidates: Sequence[UnrolledPlan]) -> np.ndarray:
        low = UnrolledPlans.of(candidates).rows <= 16
        return np.where(low, 0.5, 1.0) * estimate_micros(PROBLEM, candidates)

    winner = won(by_plans(micros)).plan
    everything = np.concatenate([micros(part) for part in pool().candidates])
    assert winner.tile.rows <= 16
    assert micros([winner])[0] <= np.quantile(everything, 0.002)


def test_where_blocks_come_in_waves_some_walk_their_code_twice() -> None:
    """They are timed with the first, behind the shortlist; of machine code alone, which is what has clusters."""
    waves = Problem(random_matrix(2000, 40, 0.2, 0), 4096, H200)

    def micros(candidate: Candidate) -> float:
        return (0.5 if walks(candidate) else 1.0) * float(estimate_micros(waves, [candidate.plan])[0])

    def walks(candidate: Candidate) -> bool:
        return bool(candidate.plan.schedule.walks > 1)

    def asked(splits: tuple[int, ...], passes: int = FULL.passes) -> tuple[Known, list[Candidate]]:
        choice, runner = search(waves, estimate_micros, 3, Stages(), splits=splits), LookupRunner(micros)
        policy = replace(FULL, rounds=2, passes=passes)
        return race_unrolled(waves, Known((), {}, choice=choice), OPTIONS, runner, Stages(), policy), runner.asked

    found, candidates = asked((1, 2))
    assert walks(winner_of(waves, found, "sass"))
    assert [walks(one) for one in candidates] == [False] * 3 + [True] * FULL.passes + [False] * 2 * FULL.batch
    assert not any(walks(one) for one in asked((1,))[1])
    assert not any(walks(one) for one in asked((1, 2), passes=0)[1])


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 10_000))
def test_the_winner_is_the_fastest_timed_and_nothing_is_timed_twice(seed: int) -> None:
    def micros(candidate: Candidate) -> float | None:
        chance = drawn(candidate, seed)
        return None if chance.random() < 0.2 else 1 + chance.random()

    runner = LookupRunner(micros)
    found, asked, shortlist = raced(runner), runner.asked, choice_of().shortlist
    times = [one for one in map(micros, asked) if one is not None]
    if times:
        assert micros(winner_of(PROBLEM, found, "sass")) == min(times)
        assert len(asked) == len(shortlist) + FULL.rounds * FULL.batch
    else:
        assert len(asked) == len(shortlist)
    assert [trial.candidate for trial in found.trials] == asked
    assert len(set(asked)) == len(asked)
    tilings = {survivor.tile: survivor.tiling for survivor in choice_of().space.survivors}
    for plan in (candidate.plan for candidate in asked):
        assert plan.tiling is tilings[plan.tile]
        assert holds(plan)


def holds(plan: UnrolledPlan) -> bool:
    candidates, space = UnrolledPlans.of([plan]), choice_of().space
    subject = Subject(PROBLEM, candidates)
    checks = [*HARDWARE, *(one.check for one in CONSTRAINTS if one.name not in {"idle_sms", *space.relaxed})]
    enough = block_counts(PROBLEM, candidates) >= space.least_blocks
    return all(bool(check(subject).holds.all()) for check in checks) and bool(enough.all())


def test_the_same_times_lead_the_same_way() -> None:
    one, other = (LookupRunner(lambda candidate: 1 + drawn(candidate).random()) for _ in range(2))
    assert won(one) == won(other)
    assert one.asked == other.asked


def test_a_space_of_few_is_timed_whole() -> None:
    problem = Problem(random_matrix(2, 3, 0.9, seed=0), 32, H200)
    choice, runner = search(problem, estimate_micros, 3, Stages()), LookupRunner(lambda _: 1.0)
    race_unrolled(problem, Known((), {}, choice=choice), OPTIONS, runner, Stages(), replace(FULL, rounds=1000))
    every = pool_of_space(problem, choice.space, estimate_micros)
    left = {(one.plan.tile, one.plan.schedule) for one in runner.asked}
    assert left >= {(one.tile, one.schedule) for one in (every[at] for at in range(len(every.forecast)))}
    assert len(left) == len(runner.asked)


def test_a_ranker_s_order_is_the_forecast() -> None:
    """Its scores are numbers of any kind; the forecast is in microseconds."""

    def backwards(problem: Problem, candidates: Sequence[UnrolledPlan]) -> np.ndarray:
        return -estimate_micros(problem, candidates)

    found = pool_of_space(PROBLEM, choice_of().space, backwards)
    (part,) = found.candidates
    scores, estimates = backwards(PROBLEM, part), estimate_micros(PROBLEM, part)
    assert np.all(np.diff(found.forecast[np.argsort(scores, kind="stable")]) >= -1e-12) and np.ptp(found.forecast) > 0
    assert found.forecast.min() < np.log(estimates).min() + np.log(2.3)


class WatchedRunner(LookupRunner):
    """Writes down how many were begun when each was timed, and what was dropped in the end."""

    def __init__(self, micros: Micros, *, is_over: Callable[[], bool] = lambda: False) -> None:
        super().__init__(micros, is_over=is_over)
        self.begun: list[Candidate] = []
        self.begun_when_timed: list[int] = []
        self.drops = 0

    def begin(self, candidates: Sequence[Candidate]) -> None:
        self.begun += candidates
        super().begin(candidates)

    def trials(self, count: int) -> Iterator[Trial]:
        for trial in super().trials(count):
            self.begun_when_timed.append(len(self.begun))
            yield trial

    def drop(self) -> None:
        self.drops += 1
        super().drop()


def test_rounds_are_built_ahead() -> None:
    """As many as the policy says are begun when one is timed; the first are timed in parts meanwhile."""
    runner, size = WatchedRunner(lambda _: 1.0), len(choice_of().shortlist)
    raced(runner)
    assert runner.begun == runner.asked and runner.drops == 1
    assert runner.begun_when_timed[:size] == [size, size + FULL.batch, size + 2 * FULL.batch]
    rounds = runner.begun_when_timed[size :: FULL.batch]
    assert rounds == [size + FULL.batch * min(at + 1 + FULL.ahead, FULL.rounds) for at in range(FULL.rounds)]
    hasty = WatchedRunner(lambda _: 1.0, is_over=lambda: len(hasty.asked) > size)
    raced(hasty)
    assert len(hasty.begun) > len(hasty.asked) and hasty.drops == 1


def test_the_seconds_of_choosing_are_counted() -> None:
    parts: list[str] = []

    class Counted(Stages):
        @contextmanager
        def part(self, name: str) -> Iterator[None]:
            parts.append(name)
            with super().part(name):
                yield

    raced(LookupRunner(lambda candidate: float(candidate.plan.tile.rows)), stages=Counted())
    assert parts == ["rank"] * (1 + FULL.rounds)  # the pool, and each round


def test_kernels_that_fail_are_skipped() -> None:
    found = raced(LookupRunner(only({first()[-1]: 5.0}, others=None)))
    assert winner_of(PROBLEM, found, "sass") == first()[-1]
    assert sum(trial.measurement.failure is not None for trial in found.trials) == len(found.trials) - 1 > 3
    assert all(trial.micros == float("inf") for trial in found.trials if trial.measurement.failure)


def test_where_all_fail_there_is_a_fault() -> None:
    runner = LookupRunner(lambda _: None)
    found = raced(runner)
    assert runner.asked == first() and runner.asked_again == []
    with pytest.raises(GpuFault, match=rf"none of {len(first())} kernels ran: {FAILURE}"):
        winner_of(PROBLEM, found, "sass")


def test_time_that_is_up_ends_it_after_what_is_timed() -> None:
    runner = LookupRunner(lambda _: 1.0, is_over=lambda: True)
    (trial,) = raced(runner).trials
    assert runner.asked == [trial.candidate] and trial.final_micros is None
    runner = LookupRunner(lambda _: 1 / len(runner.asked), is_over=lambda: len(runner.asked) >= 5)  # it would go on
    found = raced(runner)
    assert [one.candidate for one in found.trials] == runner.asked and len(runner.asked) == 5
    assert winner_of(PROBLEM, found, "sass") == runner.asked[-1] and runner.asked_again == []


def test_a_runner_that_ends_its_trials_early_has_time_for_finals() -> None:
    class EarlyRunner(LookupRunner):
        def trials(self, count: int) -> Iterator[Trial]:
            return super().trials(min(count, 5 - len(self.asked)))

    runner = EarlyRunner(lambda candidate: float(candidate.plan.tile.rows))
    found = raced(runner)
    assert len(runner.asked) == len(found.trials) == 5
    assert Counter(len(trial.finals) for trial in found.trials) == {2: 1, 3: 1, 4: 1, 5: 2}


def test_some_are_timed_before_the_finals_and_take_part_in_them() -> None:
    """By proxies, which say less than kernels: those that are timed first look slower than the others."""
    policy = replace(FULL, rounds=1, sure=2, finals=(4, 3))
    runner = LookupRunner(lambda one: float(one.plan.tile.rows), lambda one: 100.0 + one.plan.tile.rows)
    found = race_unrolled(PROBLEM, Known((), {}, choice=choice_of()), OPTIONS, runner, Stages(), policy)
    order = sorted(found.trials, key=lambda trial: trial.micros)
    assert sorted(len(trial.finals) for trial in order[:2]) == [3, 3]
    assert [len(trial.finals) for trial in order[2:5]] == [2, 1, 0]
    late = LookupRunner(lambda one: float(one.plan.tile.rows), is_over=lambda: len(late.asked_again) > 2)
    found = race_unrolled(PROBLEM, Known((), {}, choice=choice_of()), OPTIONS, late, Stages(), policy)
    assert Counter(len(trial.finals) for trial in found.trials)[1] == 2, "the first turn of the finals is cut short"


def test_it_waits_for_the_first_that_runs() -> None:
    assert won(LookupRunner(only({first()[-1]: 5.0}, others=None), is_over=lambda: True)) == first()[-1]


def test_without_time_for_any_there_are_no_trials() -> None:
    """Another kernel ran before, which is then the winner: no unrolled one is waited for."""
    runner = LookupRunner(lambda _: 1.0, is_over=lambda: True)
    runner.begin(first()[:1])
    assert len(list(runner.trials(1))) == 1
    assert raced(runner).trials == () and len(runner.asked) == 1


def test_the_fastest_are_timed_again_in_turns() -> None:
    """And the median decides: one that was fast by chance does not win."""
    lucky, steady = first()[:2]
    runner = LookupRunner(only({lucky: 1.0, steady: 2.0}, 3.0), only({lucky: 2.2, steady: 2.0}, 9.0))
    found = raced(runner)
    assert winner_of(PROBLEM, found, "sass") == steady
    beginning, *later = turns(runner.asked_again)
    assert beginning[:2] == [lucky, steady]
    assert all(turn == [steady, lucky, *beginning[2:]][: len(turn)] for turn in later)  # the slowest drop out
    counts = {trial.candidate: len(trial.finals) for trial in found.trials if trial.finals}
    assert counts == Counter(runner.asked_again)
    assert next(trial for trial in found.trials if trial.candidate == lucky).final_micros == 2.2


def turns(asked: list[Candidate]) -> list[list[Candidate]]:
    """What was asked for in the end, by turns."""
    assert len(asked) == sum(FULL.finals)
    return [asked[end - count : end] for count, end in zip(FULL.finals, accumulate(FULL.finals), strict=True)]


def test_one_that_is_fast_at_times_loses_to_a_steady_one() -> None:
    """Of some kernels every load takes another time: most of those that look fastest were lucky."""
    steady, *erratic = first()
    loads = {one: iter((1.9, 2.3, 2.4, 1.9, 2.4, 2.3)[at % 2 :]) for at, one in enumerate(erratic)}

    def again(candidate: Candidate) -> float:
        return next(loads[candidate]) if candidate in loads else 2.0 if candidate == steady else 9.0

    runner = LookupRunner(only({steady: 2.0, **dict.fromkeys(erratic, 1.9)}, 9.0), again)
    assert 1 < len(erratic) < FULL.finals[0]
    assert won(runner) == steady


def test_a_later_turn_that_time_cuts_short_does_not_count() -> None:
    late = LookupRunner(lambda _: 1.0, is_over=lambda: len(late.asked_again) > 2)
    assert Counter(len(trial.finals) for trial in raced(late).trials)[1] == 3
    turn = FULL.finals[0]
    runner = LookupRunner(lambda _: 1.0, lambda _: 2.0, is_over=lambda: len(runner.asked_again) > turn)
    found = raced(runner)
    assert len(runner.asked_again) == turn + 1
    assert Counter(len(trial.finals) for trial in found.trials)[1] == turn

    class CutRunner(LookupRunner):
        """Gives fewer than it is asked for, as where time is up before a kernel is built."""

        def again(self, candidates: Sequence[Candidate]) -> Iterator[Measurement]:
            return super().again(candidates[: turn if len(candidates) == turn else 1])

    counts = Counter(len(trial.finals) for trial in raced(CutRunner(lambda _: 1.0)).trials)
    assert counts.keys() == {0, 1} and counts[1] == turn


def test_one_that_fails_in_the_end_is_not_taken() -> None:
    racy, asked = first()[0], iter(range(1000))
    once = only({racy: 1.0}, 2.0)
    found = raced(LookupRunner(once, lambda candidate: None if candidate == racy and next(asked) == 1 else 1.5))
    assert winner_of(PROBLEM, found, "sass") != racy == fastest_first(found.trials)[0].candidate
    with pytest.raises(GpuFault, match=f"the fastest kernels ran again: {FAILURE}"):
        won(LookupRunner(once, lambda _: None))


@pytest.mark.parametrize(("cells", "is_told"), [(48 * 60, True), (48 * 60 + 1, False)])
def test_a_long_regrouping_is_told_when_it_begins(monkeypatch: pytest.MonkeyPatch, cells: int, is_told: bool) -> None:
    """With the number of M1: a log shows the beginning of stages of several parts alone."""
    monkeypatch.setattr(unrolled, "THREADED_CELLS", cells)
    told: list[tuple[str, int, int]] = []
    choice = search(PROBLEM, estimate_micros, 3, Stages(lambda *one: told.append(one)))
    of_reorder = [one for one in told if one[0] == "reorder"]
    sizes = len({plan.tile.rows for plan in choice.space.survivors})
    assert of_reorder == [("reorder", 0, sizes)] * is_told + [("reorder", 0, 1), ("reorder", 1, 1)]
