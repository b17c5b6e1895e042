"""The families that take part in a tuning."""

from collections.abc import Sequence

from lospmm.codegen import EMITTERS
from lospmm.families import warpgroups
from lospmm.families.candidate import UNROLLED
from lospmm.problem.dtype import FLOAT32
from lospmm.problem.lanes import PAIRS, SINGLE, lanes_of
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.tuning.options import DENSE, Options


def contenders(names: Sequence[str], problem: Problem, *, is_unrolled: bool) -> list[str]:
    """Return the families of ``names`` that compete with the unrolled one, or that replace it."""
    slower = ("tensor_core",) if is_unrolled and is_slower_on_tensor_cores(problem) else ()
    return [name for name in names if name not in (UNROLLED, DENSE, *slower)]


def is_slower_on_tensor_cores(problem: Problem) -> bool:
    """Return whether the tensor-core family need not be tried beside the unrolled one.

    Without warpgroup instructions its warps gather columns. In float32 and TF32 the unrolled kernel was then faster on
    267 of 269 problems that both took on an H200, and cuBLAS on the other two (benchmarks/results/families.jsonl at
    a0c7e41). Its forecasts also take long to compute.
    """
    return not problem.dtype.is_16_bit and warpgroups.refusal(problem) is not None


def takes_unrolled(problem: Problem, options: Options) -> bool:
    """Return whether the unrolled family, with A in its instructions, takes part."""
    return UNROLLED in options.family_names and unrolled_refusal(problem, options.emitter) is None


def unrolled_refusal(problem: Problem, emitter: str) -> str | None:
    """Return why ``emitter`` has no unrolled kernel of ``problem``, in a few words; None if it has."""
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
