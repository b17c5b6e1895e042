"""Thread blocks of multiplying warpgroups, 64 rows of A each, and one that copies (``row_block.cuh``)."""

from lospmm.problem.device import DeviceSpec
from lospmm.problem.problem import Problem, ceil_div

#: Rows of A of a warpgroup, and its threads.
ROWS, WARPGROUP = 64, 128

#: The most registers of a thread at launch, so that some are left to transfer, and of a multiplying thread after that.
_MOST_LAUNCHED, _MOST_TAKEN = 168, 240

#: The most tiles of C along the columns that are computed at the same time: their columns of B stay in the L2 cache.
_MOST_ACROSS = 12


def threads_of(groups: int) -> int:
    """Return the threads of a block of which ``groups`` warpgroups multiply."""
    return WARPGROUP * (groups + 1)


def registers_of(groups: int, feeding: int, device: DeviceSpec, *, blocks: int = 1) -> tuple[int, int]:
    """Return a thread's registers at launch, and those of multiplying threads after the transfer.

    A copying thread keeps ``feeding``; an SM has ``blocks`` at a time.
    """
    launched = min(_MOST_LAUNCHED, device.registers_per_sm // (blocks * threads_of(groups)) // 8 * 8)
    left = launched * (groups + 1) - feeding
    return launched, min(_MOST_TAKEN, left // groups // 8 * 8)


def grid_of(problem: Problem, rows: int, cols: int, cluster: int) -> tuple[int, int, int]:
    """Return the grid with a block for each tile of C, ``rows`` x ``cols``; x is a group of adjacent columns."""
    across = ceil_div(problem.n, cols)
    groups = ceil_div(across, _MOST_ACROSS)
    return ceil_div(across, groups), cluster, groups * ceil_div(problem.matrix.m, rows)
