"""Algorithm 2, section 6.1: the instructions with which a thread computes its rows of one tile.

The elements of B that a tile needs (one per non-empty column) are loaded in ascending order into a ring of buffers, a
fixed distance ahead of the multiply-adds that use them. Where Algorithm 2 lets its queue grow when loads outrun the
arithmetic, this schedule waits for a free buffer: the register forecast then holds for every tile.
"""

import numpy as np
from numpy.typing import NDArray

from lospmm.ir import INSTRUCTION, ZERO, Op, TileProgram
from lospmm.matrix import SparseMatrix
from lospmm.model import Schedule


def tile_program(matrix: SparseMatrix, rows: NDArray[np.int32], schedule: Schedule) -> TileProgram:
    """The program that computes ``rows`` (distinct, in the order of the stores) of C = A x B for one column."""
    return interleave(*_nonzeros_by_column(matrix, rows), rows, schedule)


def interleave(
    accumulator: NDArray[np.integer],
    column: NDArray[np.integer],
    weight: NDArray[np.float32],
    rows: NDArray[np.int32],
    schedule: Schedule,
) -> TileProgram:
    """Loads, multiply-adds and stores in the order of ``schedule``, with an accumulator for each of ``rows``.

    Multiply-add i adds weight[i] * B[column[i]] to accumulator[i]; ``column`` ascends.
    """
    loaded, uses = np.unique(column, return_counts=True)
    done = np.cumsum(uses)  # multiply-adds up to and including each column
    issue = _fmas_before_loads(done, schedule)
    buffers = min(schedule.prefetch, len(loaded))

    code = np.zeros(len(loaded) + len(column) + len(rows), dtype=INSTRUCTION)
    loads, fmas, stores = np.split(code, [len(loaded), len(loaded) + len(column)])
    ring = np.arange(len(loaded)) % max(buffers, 1)
    loads["op"], loads["target"], loads["source"] = Op.LOAD, ring, loaded
    fmas["op"], fmas["target"], fmas["source"] = Op.FMA, accumulator, np.repeat(ring, uses)
    fmas["weight"] = weight
    stores["op"], stores["target"], stores["source"] = Op.STORE, rows, np.arange(len(rows))
    # A load that waits for d multiply-adds stands before the one numbered d.
    when = np.concatenate((2 * issue, 2 * np.arange(len(column)) + 1, np.full(len(rows), 2 * len(column) + 2)))
    return TileProgram(code[np.argsort(when, kind="stable")], accumulators=len(rows), buffers=buffers)


def zero_program(rows: NDArray[np.int32]) -> TileProgram:
    """The program that writes zeros to ``rows`` of C: rows of A without a nonzero still have a result."""
    code = np.zeros(len(rows), dtype=INSTRUCTION)
    code["op"], code["target"], code["source"] = Op.STORE, rows, ZERO
    return TileProgram(code, accumulators=0, buffers=0)


def _nonzeros_by_column(
    matrix: SparseMatrix, rows: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """Row within the tile, column and value of each nonzero of the tile, by column, then by row."""
    starts = matrix.indptr[rows]
    lengths = matrix.indptr[rows + 1] - starts
    local = np.repeat(np.arange(len(rows)), lengths)
    entry = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    order = np.argsort(matrix.indices[entry], kind="stable")
    entry = entry[order]
    return local[order], matrix.indices[entry], matrix.data[entry]


def _fmas_before_loads(done: NDArray[np.int64], schedule: Schedule) -> NDArray[np.int64]:
    """How many multiply-adds come before each load, given the running count ``done`` of each column's."""
    count, ahead = len(done), schedule.prefetch
    before = np.zeros(count, dtype=np.int64)
    before[ahead:] = done[: max(count - ahead, 0)]  # a buffer is free once its column is used up
    if schedule.fmas_per_load is not None:
        for load in range(ahead, count):
            paced = max(before[load - 1] + schedule.fmas_per_load, before[load])
            before[load] = min(paced, done[load - 1])  # nothing left to compute: load at once
    return before
