"""Preparation of a tuning: forecasts and rankings of all candidates, before anything is timed.

It runs in this process, or in a builder while another tuning uses the GPU.
"""

from dataclasses import replace

from lospmm.errors import NothingFits
from lospmm.problem.lanes import in_lanes
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Pool
from lospmm.space.pool import pool_of_space
from lospmm.stages import Stages
from lospmm.tuning.forecast import is_far_behind, others_first
from lospmm.tuning.known import Choice, Known
from lospmm.tuning.options import Options, splits_of
from lospmm.tuning.plans import plans_for
from lospmm.tuning.rankers import RANKERS, untimed_model
from lospmm.tuning.refusal import takes_unrolled, without_proxies
from lospmm.tuning.unrolled import search
from lospmm.tuning.untimed import LISTED, chosen


def prepare(problem: Problem, options: Options, stages: Stages) -> Known:
    """Forecast and rank the candidates of all families. ``options`` are resolved. Raises NothingFits.

    The pool is not built yet: that is done while the first kernels are built.
    """
    is_unrolled = takes_unrolled(problem, options)
    with stages.part("constraints"):
        known = plans_of_families(problem, options)
        known = replace(known, refusals={**known.refusals, **without_proxies(problem, options)})
        if is_unrolled:
            known = replace(known, unrolled_micros=others_first(problem, options, known))
    if not is_unrolled or (known.plans and is_far_behind(known, known.plans[0].score)):
        return known
    return replace(known, choice=ranked_of(problem, options, known, stages))


def plans_of_families(problem: Problem, options: Options) -> Known:
    """Return the plans of the families that read A as data."""
    return plans_for(problem, options.family_names, options.cache, options.memory)


def prepare_with_pool(problem: Problem, options: Options) -> Known:
    """Prepare a later tuning, with its pool. Raises NothingFits."""
    known = prepare(problem, options, Stages())
    if known.choice is None:
        return known
    return replace(known, pool=pool_of(in_lanes(problem), known.choice, options))


def ranked_of(problem: Problem, options: Options, known: Known, stages: Stages) -> Choice | None:
    """Return ``ranked``; None if only other families have kernels. Raises NothingFits if none has."""
    try:
        return ranked(problem, options, stages)
    except NothingFits:
        if not known.plans:
            raise
        return None


def ranked(problem: Problem, options: Options, stages: Stages) -> Choice:
    """Return the unrolled candidates that the ranker predicts fastest. Raises NothingFits.

    If nothing will be timed and there are models for that case (``rankers.untimed_model``), they rank instead.
    """
    words, ranker, size = in_lanes(problem), RANKERS[options.ranker](problem.device), options.shortlist_size
    splits = splits_of(options.emitter)
    model = untimed_model(problem, options)
    listed = size if model is None else max(size, LISTED)
    choice = search(words, ranker, listed, stages, splits=splits)
    if model is None:
        return choice
    with stages.part("rank"):
        return chosen(words, choice, ranker, model, size=size)


def pool_of(problem: Problem, choice: Choice, options: Options) -> Pool:
    """Return the candidates that a search may time. ``problem`` is in words (``lanes.in_lanes``).

    With proxies, candidates with two words per thread are left out: a proxy has one.
    """
    is_wide = bool(choice.wide) and options.trials == "full"
    return pool_of_space(problem, choice.space, RANKERS[options.ranker](problem.device), is_wide=is_wide)
