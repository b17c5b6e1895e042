"""The race: candidates of every family, timed in rounds against the fastest so far."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise

from lospmm.errors import GpuFault
from lospmm.families import Candidate
from lospmm.gpu.bench import AGAIN, Bench
from lospmm.gpu.timing import BRIEF
from lospmm.problem.lanes import in_lanes
from lospmm.problem.problem import Problem
from lospmm.space.axes import doubled
from lospmm.space.candidates import UnrolledPlan
from lospmm.space.estimate import estimate_micros
from lospmm.space.ranker import Ranker
from lospmm.stages import Stages
from lospmm.tuning.builders import PrefetchedBuilds
from lospmm.tuning.families import NEIGHBOURS, FamilyPlans, FamilyTrials, _first, _key, _neighbours
from lospmm.tuning.finals import _failure, settled, timed_again
from lospmm.tuning.forecast import is_far_behind
from lospmm.tuning.job import TEMPLATE, TRIALS, Job, _timings, _trials, _whole
from lospmm.tuning.options import LOCKSTEPS, UNROLLED
from lospmm.tuning.prepare import Prepared, ranked_of
from lospmm.tuning.rankers import RANKERS
from lospmm.tuning.rounds import Rounds, _walked
from lospmm.tuning.runner import GpuRunner, RunnerSetup
from lospmm.tuning.search import DOUBLES_NEAR, POLICY, Choice, Policy
from lospmm.tuning.surrogate import Pool
from lospmm.tuning.trial import Batch, Clock, Closeable, Scored, Trial, fastest_first


def why_not_searched(others: FamilyTrials, *, is_over: bool) -> str | None:
    """In a few words, after ``others`` were timed first; None: the unrolled family is searched all the same."""
    fastest = others.fastest
    if fastest is None:
        return None
    if is_far_behind(others.field, fastest.settled_micros):
        taken = f"{fastest.candidate.family} takes {fastest.settled_micros:.1f}"
        return f"{others.field.unrolled_micros:.1f} us by forecast, and {taken}"
    return "no time was left to search it" if is_over else None


#: Rounds of neighbours, and how many of the fastest are timed again in each turn.
ROUNDS, FINALS = 3, (2, 2, 2)


def race_families(field: FamilyPlans, clock: Clock, *, limit_micros: float = float("inf")) -> FamilyTrials:
    """Time the entrants. ``limit_micros``: the time of a kernel that all of them have to beat."""
    first = _first(field, limit_micros)
    timed = [*_timed(clock, first, running=False)]
    for _ in range(ROUNDS):
        ran = fastest_first(timed)
        if not ran or clock.is_over():
            break
        asked = {_key(trial.candidate) for trial in timed}
        near = _neighbours(field, ran[0].candidate, asked)[:NEIGHBOURS]
        if not near:
            break
        timed += _timed(clock, near, running=True)
        if fastest_first(timed)[0] is ran[0]:
            break
    return FamilyTrials(field, tuple(timed_again(timed, clock, FINALS)))


def _timed(clock: Clock, entrants: Sequence[Candidate], *, running: bool) -> Iterator[Trial[Candidate]]:
    """Until time is up, once one ran."""
    measurements = clock.trials(entrants)
    try:
        for entrant, measurement in zip(entrants, measurements, strict=False):
            yield Trial(entrant, entrant.forecast_micros, measurement)
            running = running or measurement.timing is not None
            if running and clock.is_over():
                return
    finally:
        if isinstance(measurements, Closeable):
            measurements.close()


def choose_by_time(
    problem: Problem,
    choice: Choice,
    ranker: Ranker,
    clock: Clock,
    stages: Stages,
    *,
    locksteps: Sequence[int] = (0,),
    policy: Policy = POLICY,
    pool: Pool | None = None,
) -> Choice:
    """``choice`` with the fastest of its shortlist, and of what promised most after it, as its winner. Its shortlist is
    as it was timed.

    A round is chosen, and its kernels are built, before all of what was begun is timed, so that the GPU waits for the
    choice alone. It ends after all rounds, where nothing is left, or once time is up or a rival was found to be faster
    (``clock.is_lost``); one candidate that runs is always timed. Then the fastest are timed again, in turns of fewer
    and fewer (``timed_again``). ``stages`` counts the choices, too. ``pool`` is what may be timed, where that is known.
    Raises GpuFault where none of them ran.
    """
    rounds = Rounds(problem, lambda: pool or Pool.of(problem, choice.space, ranker, locksteps), locksteps, stages)
    spread = rounds.spread(choice.shortlist)
    timed = _in_rounds(spread, rounds, clock, policy, partial(_walked, problem, choice.space, policy.walked))
    ran = fastest_first(timed)
    if not ran:
        raise GpuFault(f"none of {len(timed)} kernels ran: {timed[0].measurement.failure}")
    if not clock.is_lost(len(ran), ran[0].micros):
        if choice.doubles and policy.doubled and not clock.is_over():
            timed += _timed_doubles(problem, choice, ran[0].micros, clock, stages, locksteps, policy)
        timed = timed_again(timed, clock, policy.finals)
    winner = settled(timed)
    if winner.settled_micros == float("inf"):
        finalists = [trial for trial in timed if trial.finals]
        raise GpuFault(f"none of the fastest {len(finalists)} kernels ran again: {_failure(finalists[0].finals)}")
    return replace(choice, winner=winner.candidate, shortlist=tuple(spread), trials=tuple(timed))


def _in_rounds(
    first: Sequence[Scored[UnrolledPlan]],
    rounds: "Rounds",
    clock: Clock,
    policy: Policy,
    last: Callable[[UnrolledPlan], Sequence[Scored[UnrolledPlan]]] | None = None,
    *,
    near_micros: float = float("inf"),
) -> list[Trial[UnrolledPlan]]:
    """Times of the ``first``, and of the rounds after them while the fastest takes no more than ``near_micros``; and of
    what comes ``last`` by the fastest, which is built while the last rounds are timed."""
    timed: list[Trial[UnrolledPlan]] = []
    with ExitStack() as stack:
        begun: deque[Batch] = deque()

        def begin(batch: Sequence[Scored[UnrolledPlan]]) -> None:
            if batch:
                begun.append(Batch(batch, iter(clock.trials([scored.candidate for scored in batch]))))
                stack.callback(begun[-1].close)

        for part in _parts(first, policy.ahead + 1):
            begin(part)
        rounds.prepare()  # while the first kernels are built
        while begun:
            timed += begun.popleft().timed(clock.is_over, first=not fastest_first(timed))
            ran = fastest_first(timed)
            if ran and (clock.is_over() or clock.is_lost(len(ran), ran[0].micros)):
                break
            if begun:
                begun[0].start()
            chosen: Sequence[Scored[UnrolledPlan]] = ()
            if ran and ran[0].micros <= near_micros and rounds.done < policy.rounds:
                chosen = rounds.next(ran, [scored for batch in begun for scored in batch.asked], policy.batch)
            if ran and not chosen and last is not None:
                chosen, last = last(ran[0].candidate), None
            begin(chosen)
    return timed


def _timed_doubles(
    problem: Problem,
    choice: Choice,
    fastest_micros: float,
    clock: Clock,
    stages: Stages,
    locksteps: Sequence[int],
    policy: Policy,
) -> list[Trial[UnrolledPlan]]:
    """Of two words to a thread, the first by the estimate, and more by rounds of their own where these are near."""

    def pool() -> Pool:
        return Pool.of_these(problem, doubled(problem, choice.space), estimate_micros, locksteps)

    rounds = Rounds(problem, pool, locksteps, stages)
    own = replace(policy, rounds=policy.doubled_rounds)
    near = DOUBLES_NEAR * fastest_micros
    return _in_rounds(rounds.spread(choice.doubles[: policy.doubled]), rounds, clock, own, near_micros=near)


def _parts(items: Sequence[Scored[UnrolledPlan]], count: int) -> Iterator[Sequence[Scored[UnrolledPlan]]]:
    """Up to ``count`` of about the same length, in order, none empty."""
    ends = [len(items) * number // count for number in range(count + 1)]
    return (items[start:end] for start, end in pairwise(ends) if start < end)


def _choose(job: Job, found: Prepared, others: FamilyTrials, bench: Bench, stock: PrefetchedBuilds) -> Choice:
    """The fastest of what is timed; ``others`` may have been before."""
    problem, options, stages = in_lanes(job.problem), job.options, job.stages
    timings, choice, pool = _timings(job, options.emitter), found.choice, found.pool
    assert choice is not None
    way = TRIALS[options.trials]
    clock = Clock(
        trials=way.trials(job, bench, timings, stock),
        finals=_whole(job, bench, timings, stock, effort=AGAIN),
        is_over=lambda: job.budget.is_over,
        rival_micros=others.fastest_micros,
    )
    ranker = RANKERS[options.ranker](problem.device)
    locksteps = LOCKSTEPS[options.emitter]
    return choose_by_time(problem, choice, ranker, clock, stages, locksteps=locksteps, policy=way.policy, pool=pool)


def _others_first(job: Job, found: Prepared, bench: Bench, stock: PrefetchedBuilds) -> tuple[Prepared, FamilyTrials]:
    """The other families, timed; and then, unless it is far behind the fastest of them, the unrolled one to search."""
    field = found.field
    assert field.unrolled_micros is not None, "it was forecast"
    others = _contest(job, field, bench, stock, limit_micros=field.unrolled_micros)
    if (why := why_not_searched(others, is_over=job.budget.is_over)) is not None:
        refused = replace(field, refusals={**field.refusals, UNROLLED: why})
        return replace(found, choice=None), replace(others, field=refused)
    choice = found.choice or ranked_of(job.problem, job.options, field, job.stages)
    return replace(found, choice=choice), others


def _others_last(
    job: Job, field: FamilyPlans, choice: Choice | None, bench: Bench, stock: PrefetchedBuilds
) -> FamilyTrials:
    """The other families, timed after the unrolled one."""
    if choice is not None and job.budget.is_over:
        return FamilyTrials(field)
    return _contest(job, field, bench, stock, limit_micros=float("inf") if choice is None else choice.micros)


def _contest(
    job: Job, field: FamilyPlans, bench: Bench, stock: PrefetchedBuilds, *, limit_micros: float
) -> FamilyTrials:
    if not field.entrants:
        return FamilyTrials(field)
    timings, crew = _timings(job, TEMPLATE), job.workshop.crew(job.options.emitter)
    kept = None if crew is None else stock  # in files: in memory ten kernels of large layers would take a gigabyte
    trials, finals = (
        _trials(GpuRunner, job, bench, TEMPLATE, RunnerSetup(crew, timings, effort, job.budget, kept))
        for effort in (BRIEF, AGAIN)
    )
    return race_families(field, Clock(trials, finals, lambda: job.budget.is_over), limit_micros=limit_micros)
