"""Fixed-length groups of what stands in one row (GroupCOO of Insum, arXiv:2510.17505), and blocks of whole rows.

A group is a row and ``length`` entries of it; a row's last group is filled up. Groups of a row are adjacent, so a
thread block that has whole rows adds them up without atomics, in an order that is always the same.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.model import ceil_div


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """``places[i]`` are the entries of group i, indices into what was grouped; -1 where it is filled up."""

    rows: NDArray[np.int32]  # (groups,)
    places: NDArray[np.int64]  # (groups, length)
    blocks: NDArray[np.int64]  # (blocks + 1,): where each block's groups begin
    empty_rows: NDArray[np.int32]


def group_counts(lengths: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Groups of each row, of rows with ``lengths`` entries."""
    return -(-lengths // length)


def make_groups(indptr: NDArray[np.int64], length: int, room: int) -> Groups:
    """The groups of rows whose entries lie at ``indptr``, in blocks of at most ``room`` groups or of one row.

    Rows that are longer than a block's room come first, the longest before all: they take longest. The others keep
    their order, in which neighbours often read the same rows of B.
    """
    lengths = np.diff(indptr)
    counts = group_counts(lengths, length)
    is_long = counts > room
    long_rows = np.flatnonzero(is_long)
    long_rows = long_rows[np.argsort(-counts[long_rows], kind="stable")]
    order = np.concatenate((long_rows, np.flatnonzero(~is_long & (counts > 0))))
    own = counts[order]
    ends = np.cumsum(own)
    total = int(ends[-1]) if len(ends) else 0
    row_of_group = np.repeat(np.arange(len(order)), own)
    within = np.arange(total) - (ends - own)[row_of_group]  # which of its row's groups
    rows = order[row_of_group]
    first = indptr[rows] + within * length
    places = first[:, np.newaxis] + np.arange(length)
    places[places >= indptr[rows + 1][:, np.newaxis]] = -1
    starts = _blocks(ends, len(long_rows), room)
    return Groups(rows.astype(np.int32), places, starts, np.flatnonzero(counts == 0).astype(np.int32))


def _blocks(ends: NDArray[np.int64], long_rows: int, room: int) -> NDArray[np.int64]:
    """Where blocks begin, of rows whose groups end at ``ends``: as many whole rows as fit, each long row alone."""
    starts = [0, *ends[:long_rows].tolist()]
    total = int(ends[-1]) if len(ends) else 0
    while starts[-1] < total:
        starts.append(int(ends[np.searchsorted(ends, starts[-1] + room, side="right") - 1]))
    return np.array(starts, dtype=np.int64)


def grid_of(column_blocks: int, blocks: int, limit: int) -> tuple[int, int, int]:
    """A grid with at least ``blocks`` along y and z together, of which y takes ``limit`` at most."""
    depth = max(1, ceil_div(blocks, limit))
    return column_blocks, max(1, ceil_div(blocks, depth)), depth
