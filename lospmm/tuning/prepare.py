"""What is known of a problem before anything is timed: by this process, or by another while a tuning has the GPU."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

from lospmm.errors import NothingFits
from lospmm.problem.lanes import in_lanes
from lospmm.problem.problem import Problem
from lospmm.stages import Stages
from lospmm.tuning.families import FamilyPlans
from lospmm.tuning.forecast import contenders, family_plans_for, is_far_behind, others_first, takes_unrolled
from lospmm.tuning.options import LOCKSTEPS, Options, splits_of
from lospmm.tuning.rankers import RANKERS
from lospmm.tuning.search import Choice, search
from lospmm.tuning.session import Session
from lospmm.tuning.surrogate import Pool
from lospmm.tuning.untimed import LISTED, chosen, model_for


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """All that is known before anything is timed. ``choice`` is None where the unrolled family has no kernel, or is far
    behind by forecast; ``pool`` also where nothing was looked for that may be timed."""

    field: FamilyPlans
    choice: Choice | None
    pool: Pool | None


def prepared(problem: Problem, options: Options, workshop: Session, stages: Stages) -> Prepared:
    """By options that are resolved: here, or what ``search_ahead`` has begun. Raises NothingFits."""
    with stages.part("constraints"):
        ahead = workshop.begun_ahead(tuning_of(problem, options))
    return ahead if isinstance(ahead, Prepared) else prepare(problem, options, stages)


def prepare(problem: Problem, options: Options, stages: Stages) -> Prepared:
    """The same by this process, without what may be timed: that is looked for while the first kernels are built."""
    is_unrolled = takes_unrolled(problem, options)
    with stages.part("constraints"):
        names = contenders(options.family_names, problem, is_unrolled=is_unrolled)
        field = family_plans_for(problem, names, options.cache)
        if is_unrolled:
            field = replace(field, unrolled_micros=others_first(problem, options, field))
    if not is_unrolled or (field.entrants and is_far_behind(field, field.entrants[0].forecast_micros)):
        return Prepared(field, None, None)
    return Prepared(field, ranked_of(problem, options, field, stages), None)


def ranked_of(problem: Problem, options: Options, field: FamilyPlans, stages: Stages) -> Choice | None:
    """``ranked``; None where there is no such kernel, but one of another family. Raises NothingFits."""
    try:
        return ranked(problem, options, stages)
    except NothingFits:
        if not field.entrants:
            raise
        return None


def ranked(problem: Problem, options: Options, stages: Stages) -> Choice:
    """The unrolled kernels that the ranker puts first; where none will be timed and a model of such choices knows them,
    those that it puts first. Raises NothingFits."""
    words, ranker, size = in_lanes(problem), RANKERS[options.ranker](problem.device), options.shortlist_size
    locksteps, splits = LOCKSTEPS[options.emitter], splits_of(options.emitter, problem.device.arch)
    model = model_for(problem, options)
    listed = size if model is None else max(size, LISTED)
    choice = search(words, ranker, listed, stages, lockstep=locksteps[0], splits=splits)
    if model is None:
        return choice
    with stages.part("rank"):
        return chosen(words, choice, ranker, model, locksteps=locksteps, size=size)


def prepare_with_pool(problem: Problem, options: Options) -> Prepared:
    """The same with what may be timed, for a tuning whose turn comes later."""
    found = prepare(problem, options, Stages())
    if found.choice is None:
        return found
    ranker, locksteps = RANKERS[options.ranker](problem.device), LOCKSTEPS[options.emitter]
    return replace(found, pool=Pool.of(in_lanes(problem), found.choice.space, ranker, locksteps))


def search_ahead(problem: Problem, options: Options, workshop: Session) -> None:
    """Have a tuning to come searched while another has the GPU, where that takes nothing from it."""
    if options.measure == "gpu" and takes_unrolled(problem, options):
        workshop.begin_ahead(tuning_of(problem, options), options.emitter, prepare_with_pool, problem, options)


def tuning_of(problem: Problem, options: Options) -> Hashable:
    """What tells a tuning from others of this process."""
    layer = problem.convolution, problem.epilogue, problem.dtype, problem.sums
    return problem.matrix.fingerprint, problem.n, problem.device, layer, options
