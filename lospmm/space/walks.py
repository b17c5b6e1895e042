"""What blocks need that walk their code twice, a piece at a time, for two columns a thread (``Schedule.walks``).

An SM gets code of its own from the L2 cache at 2.5 bytes a cycle, which feeds no more than two or three of its four
units, and code of up to 32 KiB that it walks again at once from its own cache, which feeds all of them (decision 8).
Where blocks come in waves, each wave fetches all code anew. So here a block has twice as many columns, and cuts its
tile's code into pieces that fit that cache: each thread walks a piece for one of its columns, then again for the other,
goes on to the next piece with that one, and comes back. Accumulators of the column that it is not at wait in shared
memory, which holds about as many as the registers do (docs/decisions/0031).

Which candidates walk twice is said in ``space_axes``; what they need, here.
"""

import numpy as np

from lospmm.problem.lanes import PAIRS, SINGLE, lanes_of
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Ints, Schedule, UnrolledPlan, ceil_divs

#: The columns of a thread.
WALKS = 2

#: Bytes of shared memory that a thread moves at a time: four accumulators.
KEPT_WORDS = 4
KEPT_BYTES = 16

#: Of these, those that a thread may have on their way out before it loads what it keeps of the other column.
MOST_AHEAD = 4

#: Instructions of a piece: 28 KiB, of the 32 that an SM's cache holds, which also has what is done between two walks.
PIECE_INSTRUCTIONS = 1750

#: Registers beside accumulators and buffers: addresses of B, C and what is kept, and two of the hardware. Accumulators
#: begin at a multiple of four; buffers have the places before them that nothing else has.
FIRST_ACCUMULATOR = 12
BUFFERS_BEFORE = 7
_HARDWARE_REGISTERS = 2

#: That loads have (``codegen.sass.walks``), beside the one of addresses.
SCOREBOARDS = 5

#: Bytes from the first row that a walk loads to the last that it has in flight at its beginning: a load's reach.
REACH = 8 << 20


def takes_two_passes(problem: Problem, schedule: Schedule) -> bool:
    """Whether a thread may have two columns of this problem: they are some bytes apart in every row of B and C, and
    sums are not shared."""
    is_plain = problem.convolution is None and not problem.epilogue.residual and lanes_of(problem) in (SINGLE, PAIRS)
    alone = schedule.split_k == schedule.thread_words == 1
    return is_plain and alone and schedule.fmas_per_load is None


def registers_of_passes(sums: Ints | int, prefetch: Ints | int) -> Ints:
    """REGCOUNT of a kernel of tiles of so many sums with so many elements of B in flight."""
    quads = ceil_divs(sums, KEPT_WORDS)
    buffers = np.maximum(np.asarray(prefetch) - BUFFERS_BEFORE, 0)
    found: Ints = FIRST_ACCUMULATOR + KEPT_WORDS * quads + buffers + _HARDWARE_REGISTERS
    return found


def pieces_of(instructions: int) -> int:
    """How many pieces a tile of so many loads and multiply-adds has."""
    return max(1, -(-instructions // PIECE_INSTRUCTIONS))


def kept_bytes(candidate: UnrolledPlan, sums: int, shared_bytes: int) -> int:
    """Shared memory of a block of ``candidate`` with so many sums a thread, of at most ``shared_bytes``; none where no
    tile has several pieces."""
    cols = candidate.tile.cols
    if all(pieces_of(tile.nnz + tile.nnc) == 1 for tile in candidate.tiling.tiles):
        return 0
    return kept_quads(sums, cols, shared_bytes) * KEPT_BYTES * cols


def kept_quads(sums: int, cols: int, shared_bytes: int) -> int:
    """Places for four sums that each of ``cols`` threads has in shared memory: for all of its sums, and those ahead; 0
    where there is not one ahead."""
    needed = -(-sums // KEPT_WORDS)
    ahead = min(MOST_AHEAD, shared_bytes // (KEPT_BYTES * cols) - needed)
    return needed + ahead if ahead > 0 else 0
