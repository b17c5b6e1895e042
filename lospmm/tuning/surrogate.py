"""Bayesian optimization: a surrogate model that chooses which candidates to time next.

The ranker's order gives a forecast of each candidate's time. A Gaussian process learns the errors of the forecasts from
the kernels timed so far, and applies them to similar candidates (Rasmussen and Williams, Gaussian Processes for Machine
Learning, 2006, chapter 2). The candidates with the greatest expected improvement come next (Jones, Schonlau and Welch,
Efficient Global Optimization, 1998). scikit-learn's process would compute every covariance again in each round. The
constants below were chosen on the times of benchmarks/results/paper_exhaustive.jsonl.gz, by a replay of the search
(``git show 4d5cd0a:benchmarks/search_replay.py``).
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.special import ndtr
from threadpoolctl import ThreadpoolController

from lospmm.families.candidate import Candidate, unrolled
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Floats, Ints, Pool, Schedule, TileSize, UnrolledPlan, UnrolledPlans
from lospmm.space.estimate import estimate_micros
from lospmm.space.pool import places_of
from lospmm.tuning.trial import Trial

#: Candidates whose expected improvement is computed: those with the least mean of the pool.
JUDGED = 1000

#: Standard deviations of the logarithm of a time: of a candidate from similar ones, of a linear trend along an axis,
#: and of a measurement; and the length scale of similarity, in the units of ``pool.places_of``.
LOCAL, TREND, NOISE = 0.12, 0.1, 0.02
REACH = 1.25

#: The most candidates of a kind in one round: of as many tiles, columns, blocks per tile and words per thread.
OF_A_KIND = 2

#: Initial rows of the covariance matrix, which is doubled when it is full.
ROOM = 128

#: The distance at which a trend has its deviation, in the units of ``places_of``.
TREND_REACH = 3.0


class Surrogate:
    """The posterior time of every candidate of a pool.

    Covariances are cached: each candidate that is added takes one more row of them.
    """

    def __init__(self, problem: Problem, pool: Pool, first: Sequence[Candidate] = ()) -> None:
        """Prepare a surrogate of ``pool``; ``first`` are timed in any case, and never chosen."""
        self.problem, self.pool = problem, pool
        found = (pool.find(one.plan.tile, one.plan.schedule) for one in first)
        self._taken = {index for index in found if index is not None}
        self._centre = pool.places.mean(axis=0)
        order = np.argsort(pool.forecast, kind="stable")
        single = order[pool.thread_words[order] == 1]
        self._leaders = single[np.sort(np.unique(pool.kinds[single], return_index=True)[1])]  # the first of each kind
        self._numbers: dict[tuple[TileSize, Schedule], int] = {}  # rows of the added candidates
        self._places = np.empty((0, pool.places.shape[1]))
        self._forecast = np.empty(0)
        self._covariance = np.empty((ROOM, len(pool.forecast)))  # (rows, pool), not all rows in use

    def most_promising(self, trials: Sequence[Trial], waiting: Sequence[Candidate], count: int) -> list[Candidate]:
        """Choose up to ``count`` candidates of the pool to time next, none twice, at most two of a kind.

        The first is the ranker's best among kinds whose best was not chosen yet, whatever the times say, as the
        surrogate may be wrong too; it has one word per thread, as the ranker does not know two. Candidates still
        ``waiting`` are assumed to take their expected times. Trials that run their code twice are ignored: they say
        nothing about other kernels.
        """
        ran = {one.candidate.plan: one.micros for one in trials if one.has_run and _is_alike(one.candidate)}
        if not ran:
            return []
        with _blas().limit(limits=1):  # more threads would wait for cores that build kernels
            chosen = self._most_promising(ran, [one.plan for one in waiting if _is_alike(one)], count)
        self._taken |= set(chosen)
        return [unrolled(self.pool[index], float(np.exp(self.pool.forecast[index]))) for index in chosen]

    def _most_promising(
        self, micros: Mapping[UnrolledPlan, float], waiting: Sequence[UnrolledPlan], count: int
    ) -> list[int]:
        order, improvement = self._improvements(micros, waiting)
        # Rounded, as the last bits differ between processors.
        promising = order[np.argsort(-improvement.round(9), kind="stable")]
        leader = [index for index in self._leaders.tolist() if index not in self._taken][:1]
        return leader + self._diverse(promising, count - len(leader), {*self._taken, *leader})

    def _improvements(
        self, micros: Mapping[UnrolledPlan, float], waiting: Sequence[UnrolledPlan]
    ) -> tuple[Ints, Floats]:
        """Return the JUDGED candidates of least mean, and the expected fall of the logarithm of the least time."""
        self._add([*micros, *waiting])
        timed = self._numbers_of(micros)
        residuals = np.log(list(micros.values())) - self._forecast[timed]
        mean = float(np.median(residuals))
        if waiting:
            numbers = self._numbers_of(waiting)
            weights = self._weights(timed, residuals - mean)
            expected = self._between(self._places[numbers], self._places[timed]) @ weights + mean
            timed, residuals = np.concatenate((timed, numbers)), np.concatenate((residuals, expected))
        order, means, deviations = self._lowest(timed, residuals, mean)
        gain = (np.log(min(micros.values())) - means) / deviations
        return order, deviations * (gain * ndtr(gain) + np.exp(-gain * gain / 2) / np.sqrt(2 * np.pi))

    def _diverse(self, order: Ints, count: int, taken: Set[int]) -> list[int]:
        """Return the first ``count`` of ``order``, at most OF_A_KIND of a kind while there are others."""
        chosen: list[int] = []
        others: list[int] = []
        kinds: dict[int, int] = {}
        for index in order.tolist():
            if index in taken:
                continue
            kind = int(self.pool.kinds[index])
            kinds[kind] = kinds.get(kind, 0) + 1
            (chosen if kinds[kind] <= OF_A_KIND else others).append(index)
            if len(chosen) == count:
                break
        return (chosen + others)[:count]

    def _add(self, candidates: Iterable[UnrolledPlan]) -> None:
        fresh = [one for one in candidates if (one.tile, one.schedule) not in self._numbers]
        if not fresh:
            return
        self._numbers |= {(one.tile, one.schedule): len(self._numbers) + at for at, one in enumerate(fresh)}
        places = places_of(UnrolledPlans.of(fresh))
        found = [self.pool.find(candidate.tile, candidate.schedule) for candidate in fresh]
        forecast = np.array([np.nan if index is None else self.pool.forecast[index] for index in found])
        if len(others := np.flatnonzero(np.isnan(forecast))):  # outside the pool: the estimate
            forecast[others] = np.log(estimate_micros(self.problem, UnrolledPlans.of([fresh[at] for at in others])))
        self._places = np.concatenate((self._places, places))
        self._forecast = np.concatenate((self._forecast, forecast))
        used, added = len(self._forecast) - len(fresh), self._between(places, self.pool.places)
        if used + len(fresh) > len(self._covariance):
            self._covariance = np.concatenate((self._covariance, np.empty_like(self._covariance)))
        self._covariance[used : used + len(fresh)] = added

    def _numbers_of(self, candidates: Iterable[UnrolledPlan]) -> NDArray[np.int64]:
        return np.array([self._numbers[one.tile, one.schedule] for one in candidates], dtype=np.int64)

    def _lowest(self, timed: NDArray[np.int64], residuals: Floats, mean: float) -> tuple[Ints, Floats, Floats]:
        """Return the JUDGED candidates of least mean: indices, ascending, means and standard deviations.

        Means and deviations are of logarithms of microseconds.
        """
        weights = np.zeros(len(self._forecast))
        weights[timed] = self._weights(timed, residuals - mean)
        means = weights @ self._covariance[: len(weights)] + mean + self.pool.forecast
        order = np.arange(len(means))
        if len(means) > JUDGED:
            order = np.sort(np.argpartition(means, JUDGED)[:JUDGED])
        places = self.pool.places[order]
        shares = solve_triangular(self._root(timed), self._covariance[np.ix_(timed, order)], lower=True)
        trend = ((places - self._centre) ** 2).sum(axis=1) / TREND_REACH**2 + 1
        variance = LOCAL**2 + TREND**2 * trend - (shares**2).sum(axis=0)
        return order, means[order], np.sqrt(np.maximum(variance, 1e-6))

    def _weights(self, timed: NDArray[np.int64], residuals: Floats) -> Floats:
        weights: Floats = cho_solve((self._root(timed), True), residuals)
        return weights

    def _root(self, timed: NDArray[np.int64]) -> Floats:
        places = self._places[timed]
        root: Floats = cholesky(self._between(places, places) + NOISE**2 * np.eye(len(places)), lower=True)
        return root

    def _between(self, some: Floats, others: Floats) -> Floats:
        """Return the covariances of two sets of places, (some, others)."""
        squares = (some**2).sum(axis=1)[:, np.newaxis] + (others**2).sum(axis=1) - 2 * (some @ others.T)
        local = LOCAL**2 * np.exp(squares / (-2 * REACH**2))
        trend = (some - self._centre) @ (others - self._centre).T / TREND_REACH**2 + 1
        covariance: Floats = local + TREND**2 * trend
        return covariance


def _is_alike(candidate: Candidate) -> bool:
    return bool(candidate.plan.schedule.walks == 1)


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")
