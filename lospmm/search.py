"""The search, from a problem to the candidate that is built: the one place that knows the order of the steps.

space -> constraints -> schedules -> ranker -> shortlist -> trials -> finals -> choice

Without a GPU the choice is the ranker's first. With one the shortlist is timed, and then what promises most after what
was timed so far, and then some of tile sizes of their own (``space_axes``). The fastest few are timed again, in turns.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lospmm.candidates import Candidates
from lospmm.clock import Clock
from lospmm.errors import GpuFault, NothingFits
from lospmm.estimate import estimate_micros
from lospmm.gpu.messages import Measurement
from lospmm.model import Candidate, Problem, Schedule, TileSize, Tiling
from lospmm.ranker import Ranker, shortlist
from lospmm.reorder import regroup, threads_for
from lospmm.space import Space, explore, widen
from lospmm.space_axes import doubled, walked_twice
from lospmm.stages import Stages
from lospmm.surrogate import Pool, Surrogate
from lospmm.trialled import Batch, Item, Scored, Trialled, fastest_first


@dataclass(frozen=True, slots=True)
class Policy:
    """How far a search by time goes. Times of one kernel differ by several percent, so that the fastest is not always
    the one that stays the fastest: of some, what ran before decides (docs/measuring.md)."""

    rounds: int = 14  # how often what promises most is timed,
    batch: int = 6  # and how many candidates each time
    ahead: int = 2  # rounds that are built while another is timed; the shortlist is timed in one part more
    finals: tuple[int, ...] = (8, 6, 4, 3, 2)  # of the fastest, how many are timed again in each turn
    walked: int = 4  # that walk their code twice, timed behind the rounds
    doubled: int = 9  # with two words to a thread, timed after the rounds,
    doubled_rounds: int = 8  # and rounds of such, where the fastest is near the fastest of all


POLICY = Policy()

#: Candidates of two words to a thread are not looked at whose best estimate is so many times that of the others; and no
#: more of them are timed once the fastest of the first took so many times the fastest of the others.
DOUBLES_WORTH = 1.5
DOUBLES_NEAR = 1.2

#: Without a clock they are chosen where their best estimate is so many times that of the others, or less: over 77
#: problems that were timed on an H200, near ties went to the others more often than not.
DOUBLES_SURE = 0.93


@dataclass(frozen=True, slots=True)
class Choice:
    """The winner and everything that led to it."""

    winner: Candidate
    space: Space
    shortlist: tuple[Scored[Candidate], ...]  # best first
    doubles: tuple[Scored[Candidate], ...] = ()  # the same of two words to a thread, by the estimate
    trials: tuple[Trialled[Candidate], ...] = ()  # in the order in which they were timed
    forecast_micros: float | None = None  # what the winner takes by a model of such choices; None: by the estimate

    @property
    def listed(self) -> Sequence[Scored[Candidate]]:
        """The shortlist, behind a winner that is not of it."""
        return (*(one for one in self.doubles if one.candidate is self.winner), *self.shortlist)

    @property
    def micros(self) -> float:
        """What the winner took; infinite where nothing was timed."""
        return next((one.settled_micros for one in self.trials if one.candidate is self.winner), float("inf"))


def search(
    problem: Problem,
    ranker: Ranker,
    shortlist_size: int,
    stages: Stages,
    *,
    lockstep: int = 0,
    splits: tuple[int, ...] = (1,),
) -> Choice:
    """Choose without measuring: the candidate that ``ranker`` puts first, or one of two words to a thread that is
    estimated to be faster. Raises NothingFits."""
    return search_space(
        problem, explore_problem(problem, stages, splits=splits), ranker, shortlist_size, stages, lockstep=lockstep
    )


def search_space(
    problem: Problem, space: Space, ranker: Ranker, shortlist_size: int, stages: Stages, *, lockstep: int = 0
) -> Choice:
    """The same in a space that was explored."""
    if not space.survivors:
        raise NothingFits(_refusals(problem, space))
    with stages.stage("constraints"):
        candidates = widen(problem, space, lockstep)
    with stages.stage("rank"):
        scores = ranker(problem, candidates)
        best = _listed(candidates, scores, shortlist_size)
        wide = doubled(problem, space).with_axis("lockstep", lockstep)
        found: list[Scored[Candidate]] = []
        winner = best[0].candidate
        if len(wide):
            estimates = estimate_micros(problem, candidates)
            found = _listed(wide, estimate_micros(problem, wide), shortlist_size)
            if found[0].score > DOUBLES_WORTH * estimates.min():
                found = []
            elif found[0].score <= DOUBLES_SURE * estimates.min():
                winner = found[0].candidate
    return Choice(winner, space, tuple(best), tuple(found))


def _listed(candidates: Candidates, scores: NDArray[np.float64], size: int) -> list[Scored[Candidate]]:
    """Those of the lowest scores: as many tiles of as many columns differ little in time, whatever a tile's rows."""
    tiles = candidates.by_tiling(lambda tiling: len(tiling.tiles))
    kinds = np.stack((tiles, candidates.cols, candidates.split_k), axis=1)
    chosen = shortlist(scores, size, kinds, candidates.split_k)
    return [Scored(candidates[at], float(scores[at])) for at in chosen]


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
    rounds = _Rounds(problem, lambda: pool or Pool.of(problem, choice.space, ranker, locksteps), locksteps, stages)
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
    first: Sequence[Scored[Candidate]],
    rounds: "_Rounds",
    clock: Clock,
    policy: Policy,
    last: Callable[[Candidate], Sequence[Scored[Candidate]]] | None = None,
    *,
    near_micros: float = float("inf"),
) -> list[Trialled[Candidate]]:
    """Times of the ``first``, and of the rounds after them while the fastest takes no more than ``near_micros``; and of
    what comes ``last`` by the fastest, which is built while the last rounds are timed."""
    timed: list[Trialled[Candidate]] = []
    with ExitStack() as stack:
        begun: deque[Batch] = deque()

        def begin(batch: Sequence[Scored[Candidate]]) -> None:
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
            chosen: Sequence[Scored[Candidate]] = ()
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
) -> list[Trialled[Candidate]]:
    """Of two words to a thread, the first by the estimate, and more by rounds of their own where these are near."""

    def pool() -> Pool:
        return Pool.of_these(problem, doubled(problem, choice.space), estimate_micros, locksteps)

    rounds = _Rounds(problem, pool, locksteps, stages)
    own = replace(policy, rounds=policy.doubled_rounds)
    near = DOUBLES_NEAR * fastest_micros
    return _in_rounds(rounds.spread(choice.doubles[: policy.doubled]), rounds, clock, own, near_micros=near)


def spread_over(shortlist: Sequence[Scored[Candidate]], locksteps: Sequence[int]) -> list[Scored[Candidate]]:
    """The shortlist with every lockstep in turn, which the estimate does not tell from each other."""
    spread = []
    for place, scored in enumerate(shortlist):
        candidate, lockstep = scored.candidate, locksteps[place % len(locksteps)]
        if candidate.schedule.lockstep != lockstep:
            candidate = replace(candidate, schedule=replace(candidate.schedule, lockstep=lockstep))
        spread.append(replace(scored, candidate=candidate))
    return spread


def _parts(items: Sequence[Scored[Candidate]], count: int) -> Iterator[Sequence[Scored[Candidate]]]:
    """Up to ``count`` of about the same length, in order, none empty."""
    ends = [len(items) * number // count for number in range(count + 1)]
    return (items[start:end] for start, end in pairwise(ends) if start < end)


class _Rounds:
    """What is timed next."""

    def __init__(
        self,
        problem: Problem,
        pool: Callable[[], Pool],
        locksteps: Sequence[int],
        stages: Stages,
    ) -> None:
        """``pool`` has what may be timed."""
        self.problem, self.locksteps, self.stages, self._pool = problem, locksteps, stages, pool
        self.done = 0
        self._surrogate: Surrogate | None = None
        self._taken: set[int] = set()
        self._asked: set[tuple[TileSize, Schedule]] = set()

    def spread(self, shortlist: Sequence[Scored[Candidate]]) -> list[Scored[Candidate]]:
        found = spread_over(shortlist, self.locksteps)
        self._asked |= {_key(scored.candidate) for scored in found}
        return found

    def prepare(self) -> None:
        """Have all candidates ready to choose from."""
        with self.stages.part("rank"):
            pool = self._pool()
            self._surrogate = Surrogate(self.problem, pool)
        self._taken |= {at for key in self._asked if (at := pool.find(*key)) is not None}

    def next(
        self, ran: Sequence[Trialled[Candidate]], pending: Sequence[Scored[Candidate]], count: int
    ) -> list[Scored[Candidate]]:
        """What promises most, after those that ran; those ``pending`` are taken to run as they are forecast."""
        assert self._surrogate is not None, "it is prepared"
        self.done += 1
        pool = self._surrogate.pool
        micros = {trial.candidate: trial.micros for trial in ran}
        waiting = [scored.candidate for scored in pending]
        with self.stages.part("rank"):
            chosen = self._surrogate.most_promising(micros, waiting, count, self._taken)
        self._taken |= set(chosen)
        return [Scored(pool[index], float(np.exp(pool.forecast[index]))) for index in chosen]


def _walked(problem: Problem, space: Space, count: int, fastest: Candidate) -> list[Scored[Candidate]]:
    """Those that walk their code twice: machine code does, where it has clusters too."""
    if not count or max(space.splits) == 1:
        return []
    found = walked_twice(problem, Candidates.of(space.survivors), fastest)
    return [Scored(candidate, micros) for candidate, micros in found[:count]]


def timed_again(timed: Sequence[Trialled[Item]], clock: Clock, finals: Sequence[int]) -> list[Trialled[Item]]:
    """``timed`` with the finals of the fastest: in each turn ``finals`` many, those of the least median so far.

    In turns, so that what changes meanwhile changes for all of them. What was fast by chance is found out by a few
    loads, and the others are told apart by more of them (successive halving: Karnin, Koren and Somekh, Almost Optimal
    Exploration in Multi-Armed Bandits, 2013). Time that is up in the middle of a turn leaves that turn out.
    """
    timed = list(timed)
    places = [at for at, trial in enumerate(timed) if trial.measurement.timing is not None]
    for count in finals:
        if clock.finals is None or clock.is_over():
            break
        places = sorted(places, key=lambda at: timed[at].settled_micros)[:count]
        found: list[Measurement] = []
        for measurement in clock.finals([timed[at].candidate for at in places]):
            found.append(measurement)
            if clock.is_over():
                break
        if len(found) < len(places):
            break
        for at, measurement in zip(places, found, strict=True):
            timed[at] = replace(timed[at], finals=(*timed[at].finals, measurement))
    return timed


def settled(timed: Sequence[Trialled[Item]]) -> Trialled[Item]:
    """The fastest of those that were timed again most often; of a failure only where all of them failed."""
    finalists = [trial for trial in timed if trial.finals] or fastest_first(timed)
    return min(
        finalists, key=lambda trial: (trial.settled_micros == float("inf"), -len(trial.finals), trial.settled_micros)
    )


def _failure(finals: Sequence[Measurement]) -> str | None:
    return next((one.failure for one in finals if one.failure is not None), None)


def _key(candidate: Candidate) -> tuple[TileSize, Schedule]:
    return candidate.tile, candidate.schedule


def explore_problem(problem: Problem, stages: Stages, *, splits: tuple[int, ...] = (1,)) -> Space:
    """The space and its constraints, with rows regrouped by Algorithm 1."""

    def timed_regroup(size_limits: Sequence[int]) -> dict[int, Tiling]:
        with stages.stage("reorder"):
            return regroup(problem.matrix, size_limits, workers=threads_for(problem.matrix))

    with stages.stage("constraints"):
        return explore(problem, timed_regroup, splits=splits)


def _refusals(problem: Problem, space: Space) -> str:
    counts = Counter(verdict.constraint for verdict in space.verdicts)
    refused = ", ".join(f"{count} by {name}" for name, count in counts.items())
    return f"no tile size fits {problem.device.name}: of {space.size}, {refused}"
