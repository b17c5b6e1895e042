"""The race: candidates of all families are timed, and the times so far decide which come next.

The order of a tuning that may use a GPU (the paper's Figure 1, with timing in place of its last step):

    space -> constraints -> regrouped rows -> ranker -> shortlist     without a GPU (``prepare``)
    shortlist -> rounds of the most promising -> finals               ``race_unrolled``
    first plans of each family -> neighbours of the fastest -> finals ``race_plans``

The other families come first if that may save the search for unrolled kernels, which takes a minute for a large A.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from types import MappingProxyType

import scipy  # noqa: F401 - where it is missing, that is said before a search; its parts are imported where used

from lospmm.families.candidate import UNROLLED, Candidate, unrolled
from lospmm.problem.lanes import in_lanes
from lospmm.problem.problem import Problem
from lospmm.space.axes import two_pass_plans
from lospmm.space.candidates import UnrolledPlans
from lospmm.stages import Stages
from lospmm.tuning.forecast import PROMISING, is_far_behind
from lospmm.tuning.known import Choice, Known
from lospmm.tuning.options import Options
from lospmm.tuning.prepare import pool_of, ranked_of
from lospmm.tuning.trial import Runner, Trial, fastest_first, settled, settled_micros, timed_again


@dataclass(frozen=True, slots=True)
class Policy:
    """The size of a race of unrolled kernels.

    Times of one kernel differ by several percent, so the fastest are timed again (docs/measuring.md).
    """

    rounds: int = 14  # rounds of the most promising candidates
    batch: int = 6  # candidates in a round
    ahead: int = 2  # rounds that are built while another is timed; the first candidates come in one part more
    sure: int = 0  # fastest candidates timed again before the finals, which a budget may have no time for
    finals: tuple[int, ...] = (8, 6, 4, 3, 2)  # the number of fastest candidates timed again in each turn
    wide: int = 9  # first candidates with two words per thread
    wide_rounds: int = 2  # further rounds if there are such candidates
    passes: int = 4  # first candidates that run their code twice


#: Policies by the option ``trials``. With proxies, more of the fastest candidates are timed themselves.
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"full": Policy(), "proxy": Policy(sure=4, finals=(20, 12, 6, 4, 3), wide=0, wide_rounds=0, passes=0)}
)

#: The search ends if, after ENOUGH kernels ran, the fastest takes over LOST times as long as a rival. With half a
#: million nonzeros or more, no unrolled kernel was over 16 % faster than the best of the first ten
#: (``benchmarks.skipping``).
ENOUGH, LOST = 10, 1.2

#: If no kernel was timed yet, a family is timed if its forecast is at most this times the best forecast.
PROMISING_UNTIMED = 3.0

#: First plans timed of each family, neighbours of the fastest per round, rounds, and finals as in ``Policy``.
FIRST, NEIGHBOURS, ROUNDS, FINALS = 4, 6, 3, (2, 2, 2)


def race(problem: Problem, known: Known, options: Options, runner: Runner, stages: Stages) -> Known:
    """Time the candidates of all families; return what is known then, with the trials.

    ``problem`` is the emitter's (``build.for_emitter``). Raises GpuFault and CancelledError.
    """
    policy = POLICIES[options.trials]
    if known.unrolled_micros is None:
        if known.choice is not None:
            known = race_unrolled(problem, known, options, runner, stages, policy)
            if runner.is_over:
                return known
        return race_plans(known, runner, limit_micros=settled_micros(known.unrolled_trials))
    known = race_plans(known, runner, limit_micros=known.unrolled_micros)
    if (why := why_not_searched(known, is_over=runner.is_over)) is not None:
        return replace(known, choice=None, refusals={**known.refusals, UNROLLED: why})
    if known.choice is None:
        known = replace(known, choice=ranked_of(problem, options, known, stages))
    return known if known.choice is None else race_unrolled(problem, known, options, runner, stages, policy)


def why_not_searched(known: Known, *, is_over: bool) -> str | None:
    """Return why unrolled kernels are not searched after the others were timed; None if they are."""
    fastest = settled(known.other_trials)
    if fastest is None:
        return None
    if is_far_behind(known, fastest.settled_micros):
        taken = f"{fastest.candidate.family} takes {fastest.settled_micros:.1f}"
        return f"{known.unrolled_micros:.1f} us predicted, and {taken}"
    return "no time was left to search it" if is_over else None


def race_unrolled(
    problem: Problem, known: Known, options: Options, runner: Runner, stages: Stages, policy: Policy
) -> Known:
    """Time the first unrolled candidates, then rounds of the most promising ones, then finals.

    A round is chosen and its builds are started while earlier ones wait to be timed, so that the GPU waits for the
    choice only. The race ends after all rounds, if no candidate is left, once time is up, or if it is lost to a kernel
    of another family (ENOUGH, LOST).
    """
    assert known.choice is not None, "it was ranked"
    words, rival_micros = in_lanes(problem), settled_micros(known.other_trials)
    first = _first_unrolled(words, known.choice, policy)
    trials: list[Trial] = []
    begun: deque[Sequence[Candidate]] = deque()

    def begin(candidates: Sequence[Candidate]) -> None:
        if candidates:
            runner.begin(candidates)
            begun.append(candidates)

    def is_ended() -> bool:
        ran = fastest_first(trials)
        is_lost = len(ran) >= ENOUGH and ran[0].micros > LOST * rival_micros
        return bool(ran) and (runner.is_over or is_lost)

    try:
        for part in _parts(first, policy.ahead + 1):
            begin(part)
        with stages.part("rank"):  # while the first kernels are built
            from lospmm.tuning.surrogate import Surrogate  # of SciPy, 0.2 s that only races need

            surrogate = Surrogate(words, known.pool or pool_of(words, known.choice, options), first)
        rounds = policy.rounds + (policy.wide_rounds if known.choice.wide else 0)
        while begun:
            batch = begun.popleft()
            trials += (timed := list(runner.trials(len(batch))))
            if is_ended() or len(timed) < len(batch):  # proxies end before time is up, which is for the finals
                break
            if rounds and fastest_first(trials):
                rounds -= 1
                with stages.part("rank"):
                    waiting = [one for batch in begun for one in batch]
                    begin(surrogate.most_promising(trials, waiting, policy.batch))
    finally:
        runner.drop()
    if not is_ended():
        trials = timed_again(timed_again(trials, runner, (policy.sure,)), runner, policy.finals)
    shown = replace(known.choice, shortlist=tuple(first[: len(known.choice.shortlist)]))
    return replace(known, choice=shown, trials=(*known.trials, *trials))


def _first_unrolled(problem: Problem, choice: Choice, policy: Policy) -> list[Candidate]:
    """Return the shortlist, and the best candidates that the ranker does not know.

    Those have two words per thread, or run their code twice.
    """
    first = [*choice.shortlist, *choice.wide[: policy.wide]]
    if policy.passes and max(choice.space.splits) > 1:  # machine code on a GPU with clusters
        plans = two_pass_plans(problem, UnrolledPlans.of(choice.space.survivors), choice.shortlist[0].plan)
        first += [unrolled(*found) for found in plans[: policy.passes]]
    return first


def _parts(items: Sequence[Candidate], count: int) -> list[Sequence[Candidate]]:
    """Return ``items`` in up to ``count`` parts of about the same length, none empty."""
    ends = [len(items) * number // count for number in range(count + 1)]
    return [items[start:end] for start, end in pairwise(ends) if start < end]


def race_plans(known: Known, runner: Runner, *, limit_micros: float = float("inf")) -> Known:
    """Time the best plans of each family that may beat ``limit_micros``, then neighbours of the fastest."""
    trials = _timed(runner, _first_plans(known, limit_micros))
    for _ in range(ROUNDS):
        ran = fastest_first(trials)
        if not ran or runner.is_over:
            break
        best, timed = ran[0].candidate, {trial.candidate for trial in trials}
        near = [one for one in known.plans_of(best.family) if one not in timed and _distance(one, best) == 1]
        trials += _timed(runner, near[:NEIGHBOURS])
        if not near or fastest_first(trials)[0] is ran[0]:
            break
    if known.like is None:
        trials = timed_again(trials, runner, FINALS)
    return replace(known, trials=(*known.trials, *trials))


def _timed(runner: Runner, candidates: Sequence[Candidate]) -> list[Trial]:
    runner.begin(candidates)
    try:
        return list(runner.trials(len(candidates)))
    finally:
        runner.drop()


def _first_plans(known: Known, limit_micros: float) -> list[Candidate]:
    """Return FIRST plans of each family that may win, alternating between families."""
    if not known.plans:
        return []
    limit = min(PROMISING * limit_micros, PROMISING_UNTIMED * known.plans[0].score)
    best_first = [known.plans_of(name) for name in dict.fromkeys(one.family for one in known.plans)]
    queues = [_spread(plans) for plans in best_first if plans[0].score <= limit]
    return [queue[at] for at in range(FIRST) for queue in queues if at < len(queue)]


def _spread(plans: Sequence[Candidate]) -> list[Candidate]:
    """Return FIRST plans: the best, then those that differ from all before in two fields, then others."""
    taken: list[Candidate] = []
    for one in plans:
        if len(taken) < FIRST and all(_distance(one, other) > 1 for other in taken):
            taken.append(one)
    return [*taken, *(one for one in plans if one not in taken)][:FIRST]


def _distance(one: Candidate, other: Candidate) -> int:
    """Return the number of fields in which two plans of a family differ."""
    left, right = asdict(one.plan), asdict(other.plan)
    return sum(left[name] != right.get(name) for name in left)
