"""From a candidate to the program of its kernel: one tile program per tile, and the blocks that write zeros."""

import numpy as np

from lospmm.ir import KernelProgram
from lospmm.model import ZERO_ROWS, Candidate, Problem
from lospmm.registers import forecast_registers
from lospmm.schedule import tile_program, zero_program


def lower(problem: Problem, candidate: Candidate) -> KernelProgram:
    """The kernel of ``candidate``: dispatch is 0, 1, 2, ...; the empty rows of A come last, ``ZERO_ROWS`` a block."""
    matrix, tiling = problem.matrix, candidate.tiling
    tiles = [tile_program(matrix, tile.rows, candidate.schedule) for tile in tiling.tiles]
    cuts = range(ZERO_ROWS, len(tiling.empty_rows), ZERO_ROWS)
    if len(tiling.empty_rows):
        tiles += [zero_program(rows) for rows in np.split(tiling.empty_rows, cuts)]
    return KernelProgram(
        name=kernel_name(problem),
        m=matrix.m,
        k=matrix.k,
        n=problem.n,
        cols=candidate.tile.cols,
        tiles=tuple(tiles),
        dispatch=tuple(range(len(tiles))),
        registers=forecast_registers(candidate.tile.rows, candidate.schedule, problem.device),
        column_group=candidate.schedule.column_group,
        lockstep=candidate.schedule.lockstep,
    )


def kernel_name(problem: Problem) -> str:
    """The entry point's name: the problem's shape and matrix, never a user's text."""
    matrix = problem.matrix
    return f"lospmm_{matrix.m}x{matrix.k}_n{problem.n}_{matrix.fingerprint[:8]}"
