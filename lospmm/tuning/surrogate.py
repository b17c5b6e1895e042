"""What was timed so far corrects the ranker: which candidates to time next.

The ranker's order becomes a forecast of each candidate's time, and a Gaussian process learns by how much the kernels
that were timed differ from theirs, so that what holds of one holds of those like it (Rasmussen and Williams, Gaussian
Processes for Machine Learning, 2006, chapter 2). Those of which most improvement is to be expected come next (Jones,
Schonlau and Welch, Efficient Global Optimization, 1998). The figures below were chosen on the times of
benchmarks/results/paper_exhaustive.jsonl.gz, by benchmarks/search_replay.py.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.special import ndtr
from threadpoolctl import ThreadpoolController

from lospmm.problem.problem import Problem
from lospmm.space.candidates import Ints, Schedule, TileSize, UnrolledPlan, UnrolledPlans
from lospmm.space.estimate import estimate_micros
from lospmm.space.explore import PREFETCHES, Space, widen
from lospmm.space.ranker import Ranker

Floats = NDArray[np.float64]

#: Candidates of each lockstep that are looked at: of as many tiles of as many columns with the same schedule the
#: ranker's first, of those the first so many, down to a forecast so many times the least.
LOOKED_AT = 12_000
WORTH = 2.2

#: Of these, so many are judged by what improvement is to be expected of them, those with the least mean.
JUDGED = 1000

#: Deviations of the logarithm of a time: of one candidate from those like it, of a trend along an axis, of a
#: measurement; and how far "like it" reaches, in the units of ``_places``.
LOCAL, TREND, NOISE = 0.12, 0.1, 0.02
REACH = 1.25

#: Candidates of a kind in one round: of as many tiles, columns and blocks to a tile.
OF_A_KIND = 2

#: Candidates that there is room for before it is doubled.
ROOM = 128

#: Over how many units of ``_places`` a trend has its deviation.
TREND_REACH = 3.0

#: Where a column group lies: 0 takes all columns.
_GROUPS: Mapping[int, float] = MappingProxyType({1: 0.0, 2: 0.7, 0: 1.5})


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """What may be timed, as columns."""

    candidates: tuple[UnrolledPlans, ...]  # the same tile sizes and schedules, for each lockstep
    places: Floats  # (candidates, axes)
    forecast: Floats  # logarithm of microseconds
    kinds: Ints

    @staticmethod
    def of(problem: Problem, space: Space, ranker: Ranker, locksteps: Sequence[int]) -> "Pool":
        """What a space leaves, with every schedule."""
        return Pool.of_these(problem, widen(problem, space), ranker, locksteps)

    @staticmethod
    def of_these(problem: Problem, shared: UnrolledPlans, ranker: Ranker, locksteps: Sequence[int]) -> "Pool":
        """Of ``shared``, with each lockstep."""
        parts, forecasts = [], []
        estimates = np.log(estimate_micros(problem, shared))  # which do not tell locksteps from each other
        for lockstep in locksteps:
            every = shared.with_axis("lockstep", lockstep)
            forecast = _forecast(problem, every, ranker, estimates)
            chosen = _distinct(every, forecast)
            parts.append(every.take(chosen))
            forecasts.append(forecast[chosen])
        places = np.concatenate([_places(part) for part in parts])
        kinds = np.concatenate([_kinds(part) for part in parts])
        return Pool(tuple(parts), places, np.concatenate(forecasts), kinds)

    def __getitem__(self, index: int) -> UnrolledPlan:
        for part in self.candidates:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError

    def find(self, tile: TileSize, schedule: Schedule) -> int | None:
        """The index of a candidate; None where it is not in the pool."""
        start = 0
        for part in self.candidates:
            if schedule in part.schedules:
                size = (part.rows == tile.rows) & (part.cols == tile.cols)
                found = np.flatnonzero(size & (part.schedule == part.schedules.index(schedule)))
                if len(found):
                    return start + int(found[0])
            start += len(part)
        return None


class Surrogate:
    """The posterior of every candidate of a pool. What is asked again is kept: with each candidate that is added comes
    one column of covariances."""

    def __init__(self, problem: Problem, pool: Pool) -> None:
        self.problem, self.pool = problem, pool
        self._centre = pool.places.mean(axis=0)
        order = np.argsort(pool.forecast, kind="stable")
        self._leaders = order[np.sort(np.unique(pool.kinds[order], return_index=True)[1])]  # the first of each kind
        self._numbers: dict[tuple[TileSize, Schedule], int] = {}  # of candidates that were added, by key
        self._places = np.empty((0, pool.places.shape[1]))
        self._forecast = np.empty(0)
        self._covariance = np.empty((ROOM, len(pool.forecast)))  # more rows than are in use

    def most_promising(
        self, micros: Mapping[UnrolledPlan, float], pending: Sequence[UnrolledPlan], count: int, taken: Set[int]
    ) -> list[int]:
        """Indices of up to ``count`` candidates of the pool to time next, none of ``taken``, at most two of a kind.

        The first is what the ranker puts first of the kinds whose first was not taken, whatever the times say: these
        may be misled as well. ``micros`` are the times so far; candidates still ``pending`` are taken to run as they
        are to be expected to.
        """
        with _blas().limit(limits=1):  # its threads would wait for cores that build kernels
            return self._most_promising(micros, pending, count, taken)

    def _most_promising(
        self, micros: Mapping[UnrolledPlan, float], pending: Sequence[UnrolledPlan], count: int, taken: Set[int]
    ) -> list[int]:
        self._add([*micros, *pending])
        timed = self._numbers_of(micros)
        residuals = np.log(list(micros.values())) - self._forecast[timed]
        mean = float(np.median(residuals))
        if pending:
            waiting = self._numbers_of(pending)
            weights = self._weights(timed, residuals - mean)
            expected = self._between(self._places[waiting], self._places[timed]) @ weights + mean
            timed, residuals = np.concatenate((timed, waiting)), np.concatenate((residuals, expected))
        order, means, deviations = self._lowest(timed, residuals, mean)
        gain = (np.log(min(micros.values())) - means) / deviations
        improvement = deviations * (gain * ndtr(gain) + np.exp(-gain * gain / 2) / np.sqrt(2 * np.pi))
        # The last bits differ by processor.
        promising = order[np.argsort(-improvement.round(9), kind="stable")]
        leader = [index for index in self._leaders.tolist() if index not in taken][:1]
        return leader + self._diverse(promising, count - len(leader), {*taken, *leader})

    def _diverse(self, order: Ints, count: int, taken: Set[int]) -> list[int]:
        """The first ``count``, of one kind no more than OF_A_KIND as long as there are others."""
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
        places = _places(UnrolledPlans.of(fresh))
        found = [self.pool.find(candidate.tile, candidate.schedule) for candidate in fresh]
        forecast = np.array([np.nan if index is None else self.pool.forecast[index] for index in found])
        if len(others := np.flatnonzero(np.isnan(forecast))):  # that of one that is not in the pool is its estimate
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
        """Indices of the JUDGED candidates of least mean, ascending, and their mean and deviation, of logarithms."""
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
        """Covariances of each of ``some`` places with each of ``others``."""
        squares = (some**2).sum(axis=1)[:, np.newaxis] + (others**2).sum(axis=1) - 2 * (some @ others.T)
        local = LOCAL**2 * np.exp(squares / (-2 * REACH**2))
        trend = (some - self._centre) @ (others - self._centre).T / TREND_REACH**2 + 1
        covariance: Floats = local + TREND**2 * trend
        return covariance


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


def _forecast(problem: Problem, candidates: UnrolledPlans, ranker: Ranker, estimates: Floats) -> Floats:
    """Logarithms of the estimates, in the order of the ranker: its first has the least of them."""
    if ranker is estimate_micros:
        return estimates
    forecast = np.empty_like(estimates)
    forecast[np.argsort(ranker(problem, candidates), kind="stable")] = np.sort(estimates)
    return forecast


def _distinct(candidates: UnrolledPlans, forecast: Floats) -> NDArray[np.int64]:
    """Of candidates that differ in little but rows, the first; of those LOOKED_AT and WORTH it. In their order."""
    order = np.argsort(forecast, kind="stable")
    key = _kinds(candidates) * len(candidates.schedules) + candidates.schedule
    _, first = np.unique(key[order], return_index=True)
    order = order[np.sort(first)][:LOOKED_AT]
    worth: NDArray[np.int64] = order[forecast[order] <= forecast[order[0]] + np.log(WORTH)].astype(np.int64)
    return worth


def _kinds(candidates: UnrolledPlans) -> Ints:
    """A number for as many tiles of as many columns and as many blocks to a tile."""
    tiles = candidates.by_tiling(lambda tiling: len(tiling.tiles))
    kinds: Ints = (tiles * (int(candidates.cols.max(initial=0)) + 1) + candidates.cols) * 16 + candidates.split_k
    return kinds


def _places(candidates: UnrolledPlans) -> Floats:
    """Where candidates lie: those near each other take alike. (candidates, axes)."""
    schedules = candidates.schedules
    by_schedule = np.array(
        [
            (
                1.5 * np.log2(one.split_k),
                0.5 * float(np.searchsorted(PREFETCHES, one.prefetch)),
                _GROUPS[one.column_group],
                0.7 * (one.lockstep > 0),
            )
            for one in schedules
        ]
    ).reshape(len(schedules), 4)
    tiles = candidates.by_tiling(lambda tiling: max(len(tiling.tiles), 1))
    sizes = (2 * np.log2(tiles), 2 * np.log2(candidates.cols), np.log2(candidates.rows))
    return np.column_stack((*sizes, by_schedule[candidates.schedule]))
