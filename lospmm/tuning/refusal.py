"""Why the unrolled family has no kernel of a problem."""

from lospmm.codegen import EMITTERS
from lospmm.families.candidate import UNROLLED
from lospmm.problem.dtype import FLOAT32
from lospmm.problem.lanes import PAIRS, SINGLE, lanes_of
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.tuning.options import Options


def takes_unrolled(problem: Problem, options: Options) -> bool:
    """Return whether the unrolled family, with A in its instructions, takes part."""
    return UNROLLED in options.family_names and unrolled_refusal(problem, options.emitter) is None


def without_proxies(problem: Problem, options: Options) -> dict[str, str]:
    """Return why kernels are timed where proxies were asked for, by the family that has proxies; empty otherwise."""
    why = unrolled_refusal(problem, options.emitter)
    return {} if options.trials != "proxy" or why is None else {UNROLLED: why}


def unrolled_refusal(problem: Problem, emitter: str) -> str | None:
    """Return why ``emitter`` has no unrolled kernel of ``problem``, in a few words; None if it has."""
    words = lanes_of(problem)
    if words != SINGLE and not EMITTERS[emitter].has_words:
        sums = problem.dtype.name if words == PAIRS else FLOAT32.name
        return f"dtype {problem.dtype.name}, sums {sums}: {emitter} has no unrolled kernels of them"
    matrix, own = problem.matrix, settings()
    limits = (own.max_nonzeros, "LOSPMM_MAX_NONZEROS"), (own.max_unrolled_nonzeros, "LOSPMM_MAX_UNROLLED_NONZEROS")
    limit, name = min(limits)
    if matrix.nnz + matrix.m > limit:
        return f"{matrix.nnz} nonzeros and {matrix.m} rows: together more than the {limit} of {name}"
    return None
