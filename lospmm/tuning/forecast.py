"""Whether the unrolled family is so far behind another that a search of it finds nothing.

Of millions of nonzeros an unrolled kernel has tens of megabytes of code: to search for one takes a minute, and another
family is often faster. What the fastest unrolled kernel takes is forecast by what A is like, before anything is
searched. Where others are to be timed beside it anyway, they are timed first; where it is far behind the fastest of
them, it is not searched. ``benchmarks.skipping`` says what that is worth.
"""

from collections.abc import Sequence
from functools import partial

from lospmm.codegen import EMITTERS
from lospmm.errors import GpuFault, NothingFits
from lospmm.families import Candidate, warpgroups
from lospmm.families.traits import traits_of
from lospmm.gpu.compare import Comparison
from lospmm.problem.dtype import FLOAT32
from lospmm.problem.lanes import PAIRS, SINGLE, in_lanes, lanes_of
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import UnrolledPlan
from lospmm.space.estimate import estimate_micros
from lospmm.tuning.dense import DenseChoice, dense_choice
from lospmm.tuning.families import PROMISING, FamilyPlans, FamilyTrials, family_plans
from lospmm.tuning.options import DENSE, FAMILY_NAMES, UNROLLED, Options
from lospmm.tuning.search import Choice
from lospmm_rank.predict.corrections import (
    FASTEST,
    UNTIMED,
    corrected,
    dense_micros,
    dense_share,
    factor,
    is_learned,
    sure_share,
    unrolled_micros,
)

#: A search for fewer nonzeros takes a few seconds, and is always made.
LEAST_NONZEROS = 500_000

#: A forecast of so many times the time of another family is far behind.
FAR = 1.75

#: What the forecast was learned of.
EMITTER = "sass"


def fastest_micros(problem: Problem) -> float | None:
    """What the fastest unrolled kernel takes, by forecast; None where nothing of the kind was learned."""
    device = problem.device
    if problem.sums != FLOAT32 or not is_learned(device.name):
        return None
    traits = traits_of(problem)
    micros = unrolled_micros(traits, device)
    return micros * factor(FASTEST, micros, traits=traits, device=device.name)


def others_first(problem: Problem, options: Options, field: FamilyPlans) -> float | None:
    """``fastest_micros`` where the others of ``field`` are timed before the unrolled family. None where it is searched
    first in any case: without a clock, by proxies, where families were chosen by name, where A is small, or where it is
    well ahead; with a budget, where it is ahead at all."""
    is_asked = options.measure == "gpu" and options.trials == "full" and options.emitter == EMITTER
    if not is_asked or options.family_names != FAMILY_NAMES or problem.matrix.nnz < LEAST_NONZEROS:
        return None
    micros = fastest_micros(problem)
    if micros is None or not field.entrants:
        return None
    is_short = options.budget_seconds is not None  # time may be up before the second has its turn
    limit_micros = micros if is_short else PROMISING * micros
    return micros if field.entrants[0].forecast_micros <= limit_micros else None


def is_far_behind(field: FamilyPlans, micros: float) -> bool:
    """Whether the unrolled family is, of another that takes ``micros``."""
    return field.unrolled_micros is not None and field.unrolled_micros > FAR * micros


def family_plans_for(problem: Problem, names: Sequence[str], cache: str = "cold") -> FamilyPlans:
    """The plans of these families, their forecasts corrected by what was measured on such a device; ``cache`` as of
    ``Options``."""
    traits, device = traits_of(problem, is_streamed=cache == "network"), problem.device
    of_dense = dense_micros(traits, device)
    of_dense *= factor(DENSE, of_dense, traits=traits, device=device.name)
    learned = partial(corrected, traits=traits, device=device.name)
    return family_plans(problem, names, learned, dense_micros=of_dense)


def contenders(names: Sequence[str], problem: Problem, *, is_unrolled: bool) -> list[str]:
    """Of the families that are asked for, those that the unrolled one is compared with, or that stand in for it."""
    slower = ("tensor_core",) if is_unrolled and is_slower_on_tensor_cores(problem) else ()
    return [name for name in names if name not in (UNROLLED, DENSE, *slower)]


def is_slower_on_tensor_cores(problem: Problem) -> bool:
    """Than the unrolled kernel: where no warpgroups multiply, but warps that gather columns. In float32 and TF32 the
    unrolled kernel was faster than these on 267 of 269 problems that both took on an H200, and cuBLAS on the other two
    (benchmarks/results/families.jsonl at a0c7e41). And their forecasts take long to make."""
    return not problem.dtype.is_16_bit and warpgroups.refusal(problem) is not None


def takes_unrolled(problem: Problem, options: Options) -> bool:
    """Whether the family with A in its instructions takes part."""
    return UNROLLED in options.family_names and unrolled_refusal(problem, options.emitter) is None


def unrolled_refusal(problem: Problem, emitter: str) -> str | None:
    """Why there is no unrolled kernel by ``emitter``, in a few words; None: there is."""
    words = lanes_of(problem)
    if words != SINGLE and not EMITTERS[emitter].writes(words, problem.device.arch):
        sums = problem.dtype.name if words == PAIRS else FLOAT32.name
        arch = problem.device.arch
        return f"dtype {problem.dtype.name}, sums {sums}: {emitter} has no unrolled kernels of them for {arch}"
    matrix, own = problem.matrix, settings()
    limits = (own.max_nonzeros, "LOSPMM_MAX_NONZEROS"), (own.max_unrolled_nonzeros, "LOSPMM_MAX_UNROLLED_NONZEROS")
    limit, name = min(limits)
    if matrix.nnz + matrix.m > limit:
        return f"{matrix.nnz} nonzeros and {matrix.m} rows: together more than the {limit} of {name}"
    return None


def beside_dense(
    problem: Problem,
    field: FamilyPlans,
    winner: UnrolledPlan | Candidate,
    found: Comparison | None,
    choice: Choice | None,
) -> DenseChoice:
    """Whether cuBLAS is faster than the winner: both in one run, or, without a clock, by forecast (``dense_share``).
    ``choice`` is the unrolled family's."""
    assert field.dense_micros is not None, "it was forecast"
    if found is not None:
        return dense_choice(problem, field.dense_micros, found.baselines, kernel_micros=found.micros)
    share = dense_share(problem.device.name) if isinstance(winner, UnrolledPlan) else 1.0
    to_beat = share * _forecast_micros(problem, winner, choice)
    return dense_choice(problem, field.dense_micros, {}, kernel_micros=to_beat)


def _forecast_micros(problem: Problem, winner: UnrolledPlan | Candidate, choice: Choice | None) -> float:
    """As it was corrected by what was measured on such a device."""
    if isinstance(winner, Candidate):
        return winner.forecast_micros
    name, forecast = UNTIMED, None if choice is None else choice.forecast_micros
    if forecast is None:
        name, forecast = UNROLLED, float(estimate_micros(in_lanes(problem), [winner])[0])
    return forecast * factor(name, forecast, traits=traits_of(problem), device=problem.device.name)


def winner_of(problem: Problem, choice: Choice | None, others: FamilyTrials, emitter: str) -> UnrolledPlan | Candidate:
    """The fastest of all families. Where nothing was timed, the one of the best forecast: the unrolled one, if it has a
    kernel, unless another is surely better; and of float32 and TF32 anyway on a GPU of which nothing was learned, and
    of an A without nonzeros. ``problem`` is the emitter's."""
    best = others.best
    if choice is None:
        if best is None:
            raise (_nobody_ran(others) if others.timed else NothingFits(_nobody(problem, others.field, emitter)))
        return best
    if best is None:
        return choice.winner
    if not (choice.trials or others.timed):
        may_be = problem.dtype.is_16_bit or (problem.matrix.nnz > 0 and is_learned(problem.device.name))
        least = sure_share(type(best.plan).__name__) * _forecast_micros(problem, choice.winner, choice)
        return best if may_be and best.forecast_micros < least else choice.winner
    fastest = others.fastest
    return best if fastest is not None and fastest.settled_micros < choice.micros else choice.winner


def _nobody(problem: Problem, field: FamilyPlans, emitter: str) -> str:
    refusals = {UNROLLED: unrolled_refusal(problem, emitter) or "not asked for", **field.refusals}
    return f"no family has a kernel for this: {'; '.join(f'{name}: {why}' for name, why in refusals.items())}"


def _nobody_ran(others: FamilyTrials) -> GpuFault:
    return GpuFault(f"none of {len(others.timed)} kernels ran: {others.timed[0].measurement.failure}")
