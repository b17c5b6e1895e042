"""Limits of kernels that run each piece of code twice, for two columns a thread (``Schedule.walks``).

An SM fetches code of its own from the L2 cache at 2.5 bytes per cycle, which keeps two or three of its four units busy.
Code of up to 32 KiB that it runs again at once comes from its own cache, which keeps all four busy
(docs/decisions/0008). If blocks run in several waves, each wave fetches all code again. So here a block has twice as
many columns, and its tile's code is cut into pieces that fit that cache. Each thread runs a piece for one of its
columns, then again for the other, and starts the next piece with the latter. The accumulators of the other column wait
in shared memory, which holds about as many as the registers (docs/decisions/0031).

``axes.two_pass_plans`` says which candidates run their code twice.
"""

import numpy as np

from lospmm.problem.lanes import PAIRS, SINGLE, lanes_of
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Ints, Schedule, UnrolledPlan, ceil_divs

#: Columns per thread.
WALKS = 2

#: Accumulators that a thread moves to or from shared memory at a time, and their bytes.
KEPT_WORDS = 4
KEPT_BYTES = 16

#: The most such moves to shared memory that a thread may start before it loads those of its other column.
MOST_AHEAD = 4

#: The most instructions of a piece: 28 of the 32 KiB of an SM's cache, which also holds the code between two walks.
PIECE_INSTRUCTIONS = 1750

#: Registers other than accumulators and buffers: addresses of B, C and the shared memory, and two of the hardware.
#: Accumulators start at a multiple of four; buffers use the free registers below them.
FIRST_ACCUMULATOR = 12
BUFFERS_BEFORE = 7
_HARDWARE_REGISTERS = 2

#: Scoreboards for loads (``codegen.sass.walks``); addresses have one more.
SCOREBOARDS = 5

#: Range of a load's immediate offset, in bytes: from the first row of B in flight to the last, as a walk starts.
REACH = 8 << 20


def takes_two_passes(problem: Problem, schedule: Schedule) -> bool:
    """Return whether a thread may run its code twice, once for each of two columns.

    Its columns must be equally far apart in every row of B and C, and blocks must not share sums.
    """
    is_plain = problem.convolution is None and not problem.epilogue.residual and lanes_of(problem) in (SINGLE, PAIRS)
    alone = schedule.split_k == schedule.thread_words == 1
    return is_plain and alone


def registers_of_passes(sums: Ints | int, prefetch: Ints | int) -> Ints:
    """Return the registers per thread of a kernel with ``sums`` accumulators and ``prefetch`` buffers."""
    quads = ceil_divs(sums, KEPT_WORDS)
    buffers = np.maximum(np.asarray(prefetch) - BUFFERS_BEFORE, 0)
    found: Ints = FIRST_ACCUMULATOR + KEPT_WORDS * quads + buffers + _HARDWARE_REGISTERS
    return found


def pieces_of(instructions: int) -> int:
    """Return the number of pieces of a tile with so many loads and multiply-adds."""
    return max(1, -(-instructions // PIECE_INSTRUCTIONS))


def kept_bytes(candidate: UnrolledPlan, sums: int, shared_bytes: int) -> int:
    """Return the shared memory of a block, in bytes, at most ``shared_bytes``, with ``sums`` per thread.

    0 if no tile of ``candidate`` has several pieces.
    """
    cols = candidate.tile.cols
    if all(pieces_of(instructions) == 1 for instructions in (candidate.tiling.nnz + candidate.tiling.nnc).tolist()):
        return 0
    return kept_quads(sums, cols, shared_bytes) * KEPT_BYTES * cols


def kept_quads(sums: int, cols: int, shared_bytes: int) -> int:
    """Return the groups of four sums that each of ``cols`` threads has in shared memory.

    Enough for all of its ``sums``, and up to MOST_AHEAD more; 0 if there is no room for even one more.
    """
    needed = -(-sums // KEPT_WORDS)
    ahead = min(MOST_AHEAD, shared_bytes // (KEPT_BYTES * cols) - needed)
    return needed + ahead if ahead > 0 else 0
