"""Rows of A in compressed form, read at run time: for matrices of any size, and any N (row splitting, as in Sputnik).

A warp computes one row of C for ``32 x vector`` columns. Rows go to warps by falling length, so that the warps of a
block, and the blocks that run at the same time, have about as much to do (Gale et al. 2020, "row swizzle").
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.families.traffic import Traffic, micros_of
from lospmm.model import Launch, Problem, ceil_div
from lospmm.packed import PackedKernel, pack, source_of_template

WARPS = (2, 4, 8)
VECTORS = (1, 2, 4)

#: Blocks along y that CUDA allows.
MAX_GRID_HEIGHT = 65_535

_WARP = 32


@dataclass(frozen=True, slots=True)
class Plan:
    warps: int  # of a block, each with a row of its own
    vector: int  # columns next to each other that a thread computes


def refusal(problem: Problem) -> str | None:
    if problem.convolution is not None:
        return "a convolution"
    if ceil_div(problem.matrix.m, max(WARPS)) > MAX_GRID_HEIGHT:
        return f"more than {MAX_GRID_HEIGHT * max(WARPS)} rows"
    return None


def plans(problem: Problem) -> list[Plan]:
    """Vectors that divide N, so that every row of B and C is aligned to them."""
    return [
        Plan(warps, vector)
        for warps in WARPS
        for vector in VECTORS
        if problem.n % vector == 0
        and ceil_div(problem.matrix.m, warps) <= MAX_GRID_HEIGHT
        and (vector == 1 or problem.n > _WARP * vector // 2)
    ]


def forecast(problem: Problem, plans: Sequence[Plan]) -> NDArray[np.float64]:
    """Every nonzero reads a piece of a row of B from L2."""
    matrix, size = problem.matrix, problem.dtype.element_bytes
    found = []
    for plan in plans:
        columns = ceil_div(problem.n, _WARP * plan.vector) * _WARP * plan.vector
        found.append(
            micros_of(
                problem,
                Traffic(
                    l2_bytes=matrix.nnz * (problem.n * size + 8 * columns / (_WARP * plan.vector)),
                    instructions=matrix.nnz * columns * (2 + 4 / plan.vector),
                    threads=ceil_div(matrix.m, plan.warps) * plan.warps * columns / plan.vector,
                ),
            )
        )
    return np.array(found)


def pack_plan(problem: Problem, plan: Plan) -> PackedKernel:
    matrix, dtype, epilogue = problem.matrix, problem.dtype, problem.epilogue
    lengths = np.diff(matrix.indptr)
    rows = np.argsort(-lengths, kind="stable").astype(np.int32)
    cols = _WARP * plan.vector
    settings = {"WARPS": plan.warps, "VECTOR": plan.vector}
    return PackedKernel(
        entry="lospmm_csr",
        source=source_of_template("csr", settings, dtype=dtype, epilogue=epilogue),
        data=pack(
            (matrix.m, problem.n),
            (rows, matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32), dtype.rounded(matrix.data)),
            epilogue=epilogue,
        ),
        launch=Launch((ceil_div(problem.n, cols), ceil_div(matrix.m, plan.warps), 1), _WARP * plan.warps),
        registers=128,
        cols=cols,
        dtype=dtype,
        takes_residual=epilogue.residual,
    )
