"""Decisions from forecasts and times: which families are timed first, and which candidate wins.

With millions of nonzeros an unrolled kernel has tens of megabytes of code: the search takes a minute, and another
family is often faster. So the time of the fastest unrolled kernel is forecast from traits of A before the search. Other
families that may win are then timed first; if the unrolled one is far behind the fastest of them, it is not searched.
``benchmarks.skipping`` measures what that saves.
"""

import math
from collections.abc import Mapping

from lospmm.errors import GpuFault, NothingFits
from lospmm.families.candidate import UNROLLED, Candidate
from lospmm.families.traits import traits_of
from lospmm.gpu.libraries import BaselineTime
from lospmm.problem.dtype import FLOAT32
from lospmm.problem.lanes import in_lanes
from lospmm.problem.problem import Problem
from lospmm.space.estimate import estimate_micros
from lospmm.tuning.dense import DenseChoice, dense_choice
from lospmm.tuning.known import Choice, Known
from lospmm.tuning.options import FAMILY_NAMES, Options
from lospmm.tuning.refusal import unrolled_refusal
from lospmm.tuning.trial import settled
from lospmm_rank.predict.corrections import (
    FASTEST,
    UNTIMED,
    dense_share,
    factor,
    is_learned,
    sure_share,
    unrolled_micros,
)

#: With fewer nonzeros and no budget the unrolled family is always searched: that takes a few seconds.
LEAST_NONZEROS = 500_000

#: The unrolled family is far behind if its forecast is more than this times another family's time.
FAR = 1.75

#: A family is timed if its forecast is at most this times the time to beat. On an H200, the forecasts of at most 7 % of
#: the kernels exceeded their times by a larger factor.
PROMISING = 1.5

#: The emitter whose kernels the forecast was learned from.
EMITTER = "sass"


def fastest_micros(problem: Problem) -> float | None:
    """Return the forecast of the fastest unrolled kernel, in microseconds; None if no model was learned."""
    device = problem.device
    if problem.sums != FLOAT32 or not is_learned(device):
        return None
    traits = traits_of(problem)
    micros = unrolled_micros(traits, device)
    return micros * factor(FASTEST, micros, traits=traits, device=device)


def others_first(problem: Problem, options: Options, known: Known) -> float | None:
    """Return ``fastest_micros`` if other families are timed before the unrolled one; None if not.

    The unrolled family is first without a GPU, with proxies, if families were chosen by name, if A is small, or if its
    forecast is well ahead; with a budget, if it is ahead at all, however small A is.
    """
    is_asked = options.measure == "gpu" and options.trials == "full" and options.emitter == EMITTER
    is_short = options.budget_seconds is not None  # time may be up before the second family is timed
    is_large = is_short or problem.matrix.nnz >= LEAST_NONZEROS
    if not is_asked or options.family_names != FAMILY_NAMES or not is_large:
        return None
    micros = fastest_micros(problem)
    if micros is None or not known.plans:
        return None
    limit_micros = micros if is_short else PROMISING * micros
    return micros if known.plans[0].score <= limit_micros else None


def is_far_behind(known: Known, micros: float) -> bool:
    """Return whether the unrolled family's forecast is far behind a kernel that takes ``micros``."""
    return known.unrolled_micros is not None and known.unrolled_micros > FAR * micros


def beside_dense(
    problem: Problem,
    known: Known,
    winner: Candidate,
    times: Mapping[str, BaselineTime] | None = None,
    winner_micros: float = math.nan,
) -> DenseChoice:
    """Return the comparison of cuBLAS with the winner: by times of one run if given, else by forecast.

    ``times`` are the libraries' times, by name, from the run that gave ``winner_micros``.
    """
    assert known.dense_micros is not None, "it was forecast"
    if times is not None:
        return dense_choice(problem, known.dense_micros, times, kernel_micros=winner_micros)
    share = dense_share(problem.device) if winner.is_unrolled else 1.0
    to_beat = share * forecast_micros(problem, winner, known.choice)
    return dense_choice(problem, known.dense_micros, {}, kernel_micros=to_beat)


def forecast_micros(problem: Problem, candidate: Candidate, choice: Choice | None) -> float:
    """Return a candidate's forecast in microseconds, corrected by measurements on such a device."""
    if not candidate.is_unrolled:
        return candidate.score
    name, forecast = UNTIMED, None if choice is None else choice.forecast_micros
    if forecast is None:
        name, forecast = UNROLLED, float(estimate_micros(in_lanes(problem), [candidate.plan])[0])
    return forecast * factor(name, forecast, traits=traits_of(problem), device=problem.device)


def winner_of(problem: Problem, known: Known, emitter: str) -> Candidate:
    """Return the fastest candidate of all families; if nothing was timed, the best by forecast.

    By forecast, an unrolled kernel wins unless another is surely better. In float32 and TF32 it always wins on a GPU
    without learned forecasts, and if A has no nonzeros. ``problem`` is the emitter's (``build.for_emitter``).
    Raises NothingFits if no family has a kernel, GpuFault if no kernel that was timed ran.
    """
    if known.trials:
        own, other = settled(known.unrolled_trials), settled(known.other_trials)
        fastest = min((one for one in (own, other) if one), key=lambda one: one.settled_micros, default=None)
        if fastest is None:
            raise _nobody_ran(known)
        return fastest.candidate
    best, choice = known.plans[0] if known.plans else None, known.choice
    if choice is None:
        if best is None:
            raise NothingFits(_nobody(problem, known, emitter))
        return best
    if best is None:
        return choice.winner
    may_be = problem.dtype.is_16_bit or (problem.matrix.nnz > 0 and is_learned(problem.device))
    least = sure_share(type(best.plan).__name__) * forecast_micros(problem, choice.winner, choice)
    return best if may_be and best.score < least else choice.winner


def _nobody(problem: Problem, known: Known, emitter: str) -> str:
    own = unrolled_refusal(problem, emitter)
    refusals = ({} if own is None else {UNROLLED: own}) | dict(known.refusals)
    return f"no family has a kernel for this: {'; '.join(f'{name}: {why}' for name, why in refusals.items())}"


def _nobody_ran(known: Known) -> GpuFault:
    finals = [one.failure for trial in known.trials for one in trial.finals if one.failure is not None]
    if finals:
        return GpuFault(f"none of the fastest kernels ran again: {finals[0]}")
    return GpuFault(f"none of {len(known.trials)} kernels ran: {known.trials[0].measurement.failure}")
