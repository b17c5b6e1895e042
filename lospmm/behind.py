"""Whether the unrolled family is so far behind another that a search of it finds nothing.

Of millions of nonzeros an unrolled kernel has tens of megabytes of code: to search for one takes a minute, and another
family is often faster. What the fastest unrolled kernel takes is forecast by what A is like, before anything is
searched. Where others are to be timed beside it anyway, they are timed first; where it is far behind the fastest of
them, it is not searched. ``benchmarks.skipping`` says what that is worth.
"""

from lospmm.contest import PROMISING, Contest, Field
from lospmm.dtype import FLOAT32
from lospmm.families.traits import traits_of
from lospmm.model import Problem
from lospmm.options import FAMILY_NAMES, Options
from lospmm_rank.families import FASTEST, factor, is_learned, unrolled_micros

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


def others_first(problem: Problem, options: Options, field: Field) -> float | None:
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


def is_far_behind(field: Field, micros: float) -> bool:
    """Whether the unrolled family is, of another that takes ``micros``."""
    return field.unrolled_micros is not None and field.unrolled_micros > FAR * micros


def why_not_searched(others: Contest, *, is_over: bool) -> str | None:
    """In a few words, after ``others`` were timed first; None: the unrolled family is searched all the same."""
    fastest = others.fastest
    if fastest is None:
        return None
    if is_far_behind(others.field, fastest.settled_micros):
        taken = f"{fastest.candidate.family} takes {fastest.settled_micros:.1f}"
        return f"{others.field.unrolled_micros:.1f} us by forecast, and {taken}"
    return "no time was left to search it" if is_over else None
