"""Lowering of a candidate to a kernel program: one tile program per tile, and blocks that write zeros."""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.schedule import tile_programs, zero_program
from lospmm.errors import Unsupported
from lospmm.problem.convolution import order_of_rows
from lospmm.problem.dtype import FLOAT32
from lospmm.problem.lanes import in_lanes, lanes_of
from lospmm.problem.long_rows import chain_limits
from lospmm.problem.problem import Problem
from lospmm.space.candidates import ZERO_ROWS, UnrolledPlan
from lospmm.space.registers import forecast_of_candidate, prefetch_of
from lospmm.space.swaps import swapped
from lospmm.space.walks import REACH, WALKS, kept_bytes, pieces_of, takes_two_passes


def lower(problem: Problem, candidate: UnrolledPlan) -> KernelProgram:
    """Return the kernel program of ``candidate``, with dispatch 0, 1, 2, ...

    The empty rows of A come last, ``ZERO_ROWS`` a block, or in a block for each part if tiles have several. The
    columns of 16-bit types are those of words (``lospmm.problem.lanes``). For tf32 the program computes in float32,
    which is more exact than required. Raises Unsupported for several words to a thread together with several parts.
    """
    matrix, tiling = problem.matrix, candidate.tiling
    schedule = replace(candidate.schedule, prefetch=prefetch_of(problem, candidate))
    words = lanes_of(problem, schedule.thread_words)
    if schedule.thread_words > 1 and schedule.split_k > 1:
        raise Unsupported("two words a thread cannot be combined with split-K")
    epilogue = problem.epilogue
    order = None if problem.convolution is None else order_of_rows(problem.convolution)
    limits = chain_limits(matrix, problem.dtype, schedule.split_k)
    tiles = [
        program
        for rows in tiling.tiles
        for program in tile_programs(matrix, rows, schedule, epilogue=epilogue, order=order, limits=limits)
    ]
    kept = _kept_bytes(problem, candidate, max((tile.accumulators for tile in tiles), default=0))
    cuts = range(ZERO_ROWS, len(tiling.empty_rows), ZERO_ROWS)
    if len(tiling.empty_rows):
        blocks = np.split(tiling.empty_rows, cuts)
        tiles += [
            zero_program(part, epilogue=epilogue, accumulators=candidate.tile.rows)
            for block in blocks
            for part in np.array_split(block, schedule.split_k)
        ]
    return KernelProgram(
        name=kernel_name(problem),
        m=matrix.m,
        k=matrix.k,
        n=problem.n // words.columns,
        cols=candidate.tile.cols,
        tiles=tuple(tiles),
        dispatch=tuple(range(len(tiles))),
        registers=forecast_of_candidate(problem, candidate),
        column_group=schedule.column_group,
        split_k=schedule.split_k,
        convolution=problem.convolution,
        epilogue=epilogue,
        words=words,
        walks=schedule.walks,
        kept_bytes=kept,
        dtype=problem.dtype if problem.dtype.is_16_bit else FLOAT32,
    )


#: Plans of a search that differ only in their schedule have the same tiling.
_swapped = lru_cache(maxsize=64)(swapped)


def with_swaps(problem: Problem, plan: UnrolledPlan) -> UnrolledPlan:
    """Return ``plan`` with swapped rows, unless its kernel would take more registers."""
    found = replace(plan, tiling=_swapped(problem.matrix, plan.tiling))
    needed, before = (forecast_of_candidate(problem, one) for one in (found, plan))
    return found if needed <= before else plan  # a tile with more long rows takes more


def _kept_bytes(problem: Problem, candidate: UnrolledPlan, sums: int) -> int:
    """Return the shared memory, in bytes, of a kernel that walks its code twice with ``sums`` a thread.

    Raises Unsupported for problems that have no such kernel.
    """
    schedule, cols = candidate.schedule, candidate.tile.cols
    if schedule.walks == 1:
        return 0
    words, n = lanes_of(problem), in_lanes(problem).n
    if not takes_two_passes(problem, schedule) or WALKS * cols > n:
        raise Unsupported(
            f"{schedule.walks} walks need {WALKS * cols} columns or more, and no residual, convolution or split-K"
        )
    if schedule.prefetch > problem.matrix.k or schedule.prefetch * n * words.stored_bytes > REACH:
        raise Unsupported(f"{schedule.walks} walks: the first {schedule.prefetch} rows of B must lie within 8 MiB")
    kept = kept_bytes(candidate, sums, problem.device.shared_bytes_per_block)
    if kept == 0 and any(pieces_of(each) > 1 for each in (candidate.tiling.nnz + candidate.tiling.nnc).tolist()):
        raise Unsupported(f"{schedule.walks} walks: no shared memory for {sums} sums of each of {cols} threads")
    return kept


def kernel_name(problem: Problem) -> str:
    """Return the entry point's name, made of the problem's shape, matrix and epilogue, never of user text."""
    matrix, convolution, epilogue = problem.matrix, problem.convolution, problem.epilogue
    window = "" if convolution is None else f"_conv{convolution.kernel_height}x{convolution.kernel_width}"
    added = {"bias": epilogue.bias is not None, "residual": epilogue.residual, "relu": epilogue.relu}
    parts = "".join(f"_{name}" for name, is_there in added.items() if is_there)
    return f"lospmm_{matrix.m}x{matrix.k}_n{problem.n}_{matrix.fingerprint[:8]}{window}{parts}"
