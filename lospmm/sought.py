"""What is known of a problem before anything is timed: by this process, or by another while a tuning has the GPU."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lospmm.behind import is_far_behind, others_first
from lospmm.codegen import EMITTERS
from lospmm.contest import Field, field_of
from lospmm.dtype import FLOAT32
from lospmm.errors import NothingFits
from lospmm.families import warpgroups
from lospmm.families.traits import traits_of
from lospmm.model import Problem
from lospmm.options import DENSE, LOCKSTEPS, UNROLLED, Options, splits_of
from lospmm.rankers import RANKERS
from lospmm.search import Choice, search
from lospmm.settings import settings
from lospmm.stages import Stages
from lospmm.surrogate import Pool
from lospmm.words import PAIRS, SINGLE, in_words, words_of
from lospmm.workshop import Workshop
from lospmm_rank import untimed
from lospmm_rank.families import corrected, dense_micros, factor


@dataclass(frozen=True, slots=True, eq=False)
class Sought:
    """All that is known before anything is timed. ``choice`` is None where the unrolled family has no kernel, or is far
    behind by forecast; ``pool`` also where nothing was looked for that may be timed."""

    field: Field
    choice: Choice | None
    pool: Pool | None


def sought(problem: Problem, options: Options, workshop: Workshop, stages: Stages) -> Sought:
    """By options that are resolved: here, or what ``search_ahead`` has begun. Raises NothingFits."""
    with stages.part("constraints"):
        ahead = workshop.begun_ahead(tuning_of(problem, options))
    return ahead if isinstance(ahead, Sought) else sought_here(problem, options, stages)


def sought_here(problem: Problem, options: Options, stages: Stages) -> Sought:
    """The same by this process, without what may be timed: that is looked for while the first kernels are built."""
    is_unrolled = takes_unrolled(problem, options)
    with stages.part("constraints"):
        names = contenders(options.family_names, problem, is_unrolled=is_unrolled)
        field = field_for(problem, names, options.cache)
        if is_unrolled:
            field = replace(field, unrolled_micros=others_first(problem, options, field))
    if not is_unrolled or (field.entrants and is_far_behind(field, field.entrants[0].forecast_micros)):
        return Sought(field, None, None)
    return Sought(field, ranked_of(problem, options, field, stages), None)


def ranked_of(problem: Problem, options: Options, field: Field, stages: Stages) -> Choice | None:
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
    words, ranker, size = in_words(problem), RANKERS[options.ranker](problem.device), options.shortlist_size
    locksteps, splits = LOCKSTEPS[options.emitter], splits_of(options.emitter, problem.device.arch)
    model = untimed.model_for(problem, options)
    listed = size if model is None else max(size, untimed.LISTED)
    choice = search(words, ranker, listed, stages, lockstep=locksteps[0], splits=splits)
    if model is None:
        return choice
    with stages.part("rank"):
        return untimed.chosen(words, choice, ranker, model, locksteps=locksteps, size=size)


def sought_wholly(problem: Problem, options: Options) -> Sought:
    """The same with what may be timed, for a tuning whose turn comes later."""
    found = sought_here(problem, options, Stages())
    if found.choice is None:
        return found
    ranker, locksteps = RANKERS[options.ranker](problem.device), LOCKSTEPS[options.emitter]
    return replace(found, pool=Pool.of(in_words(problem), found.choice.space, ranker, locksteps))


def search_ahead(problem: Problem, options: Options, workshop: Workshop) -> None:
    """Have a tuning to come searched while another has the GPU, where that takes nothing from it."""
    if options.measure == "gpu" and takes_unrolled(problem, options):
        workshop.begin_ahead(tuning_of(problem, options), options.emitter, sought_wholly, problem, options)


def tuning_of(problem: Problem, options: Options) -> Hashable:
    """What tells a tuning from others of this process."""
    layer = problem.convolution, problem.epilogue, problem.dtype, problem.sums
    return problem.matrix.fingerprint, problem.n, problem.device, layer, options


def field_for(problem: Problem, names: Sequence[str], cache: str = "cold") -> Field:
    """The plans of these families, their forecasts corrected by what was measured on such a device; ``cache`` as of
    ``Options``."""
    traits, device = traits_of(problem, is_streamed=cache == "network"), problem.device
    of_dense = dense_micros(traits, device)
    of_dense *= factor(DENSE, of_dense, traits=traits, device=device.name)
    learned = partial(corrected, traits=traits, device=device.name)
    return field_of(problem, names, learned, dense_micros=of_dense)


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
    words = words_of(problem)
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
