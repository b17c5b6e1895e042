"""From a candidate to the program of its kernel: one tile program per tile, and the blocks that write zeros."""

import numpy as np

from lospmm.ir import KernelProgram
from lospmm.model import ZERO_ROWS, Candidate, Problem
from lospmm.registers import forecast_registers
from lospmm.schedule import tile_programs, zero_program


def lower(problem: Problem, candidate: Candidate) -> KernelProgram:
    """The kernel of ``candidate``: dispatch is 0, 1, 2, ...; the empty rows of A come last, ``ZERO_ROWS`` a block, or a
    block for each part where tiles have several.
    """
    matrix, tiling = problem.matrix, candidate.tiling
    schedule = candidate.schedule
    tiles = [program for tile in tiling.tiles for program in tile_programs(matrix, tile.rows, schedule)]
    cuts = range(ZERO_ROWS, len(tiling.empty_rows), ZERO_ROWS)
    if len(tiling.empty_rows):
        blocks = np.split(tiling.empty_rows, cuts)
        tiles += [zero_program(rows) for block in blocks for rows in np.array_split(block, schedule.split_k)]
    return KernelProgram(
        name=kernel_name(problem),
        m=matrix.m,
        k=matrix.k,
        n=problem.n,
        cols=candidate.tile.cols,
        tiles=tuple(tiles),
        dispatch=tuple(range(len(tiles))),
        registers=forecast_registers(candidate.tile.rows, schedule, problem.device),
        column_group=schedule.column_group,
        lockstep=schedule.lockstep,
        split_k=schedule.split_k,
    )


def kernel_name(problem: Problem) -> str:
    """The entry point's name: the problem's shape and matrix, never a user's text."""
    matrix = problem.matrix
    return f"lospmm_{matrix.m}x{matrix.k}_n{problem.n}_{matrix.fingerprint[:8]}"
