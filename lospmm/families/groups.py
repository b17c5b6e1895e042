"""Groups of equally many entries of a row (GroupCOO of Insum, arXiv:2510.17505), in blocks of rows.

A group is a row and ``length`` entries of it; a row's last group is padded. Groups of a row are adjacent, so a thread
block that has whole rows adds them up without atomics, in an order that is always the same.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.space.candidates import Ints, ceil_divs


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Groups; ``places[i]`` are the entries of group i, as indices into the grouped array; -1 is padding."""

    rows: NDArray[np.int32]  # (groups,)
    places: NDArray[np.int64]  # (groups, length)
    blocks: NDArray[np.int64]  # (blocks + 1,): where each block's groups begin
    empty_rows: NDArray[np.int32]


def make_groups(indptr: NDArray[np.int64], length: int, room: int) -> Groups:
    """Return the groups of rows with entries at ``indptr``, in blocks of ``room`` groups or of one row.

    Rows that are longer than a block's room come first, the longest before all: they take longest. The others keep
    their order, in which neighbours often read the same rows of B.
    """
    counts = ceil_divs(np.diff(indptr), length)
    is_long = counts > room
    long_rows = np.flatnonzero(is_long)
    long_rows = long_rows[np.argsort(-counts[long_rows], kind="stable")]
    order = np.concatenate((long_rows, np.flatnonzero(~is_long & (counts > 0))))
    own = counts[order]
    ends = np.cumsum(own)
    row_of_group = np.repeat(np.arange(len(order)), own)
    within = np.arange(len(row_of_group)) - (ends - own)[row_of_group]  # which of its row's groups
    rows = order[row_of_group]
    places = (indptr[rows] + within * length)[:, np.newaxis] + np.arange(length)
    places[places >= indptr[rows + 1][:, np.newaxis]] = -1
    empty_rows = np.flatnonzero(counts == 0).astype(np.int32)
    return Groups(rows.astype(np.int32), places, _blocks(ends, len(long_rows), room), empty_rows)


def team_starts(groups: Groups, teams: int) -> NDArray[np.int64]:
    """Return where the groups of each team begin, (blocks x teams + 1,): equally many for a block's teams.

    A start moves by up to half a team's groups to the beginning of a row, which saves an addition.
    """
    begins, ends = groups.blocks[:-1], groups.blocks[1:]
    chunks = -(-(ends - begins) // teams)[:, np.newaxis]
    even = np.minimum(begins[:, np.newaxis] + np.arange(teams) * chunks, ends[:, np.newaxis])
    of_rows = np.flatnonzero(np.diff(groups.rows, prepend=-1, append=-2))  # first groups, and the end
    after = np.searchsorted(of_rows, even)
    upper, lower = of_rows[after], of_rows[np.maximum(after - 1, 0)]
    nearest = np.where(upper - even <= even - lower, upper, lower)
    starts = np.where(2 * abs(nearest - even) <= chunks, nearest, even)
    starts[:, 0] = begins
    return np.append(starts.reshape(-1), groups.blocks[-1])


def _blocks(ends: Ints, long_rows: int, room: int) -> NDArray[np.int64]:
    """Return where blocks begin: as many whole rows as fit, each long row alone; groups end at ``ends``."""
    starts = [0, *ends[:long_rows].tolist()]
    total = int(ends[-1]) if len(ends) else 0
    while starts[-1] < total:
        starts.append(int(ends[np.searchsorted(ends, starts[-1] + room, side="right") - 1]))
    return np.array(starts, dtype=np.int64)
