"""Pieces of a tile that is walked twice: the loads and multiply-adds of each (``walks``)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.ops import Op, filling, last_filled
from lospmm.space.walks import pieces_of


@dataclass(frozen=True, slots=True, eq=False)
class RingPiece:
    """One piece: its slots of the ring, in order, and its multiply-adds.

    The first slots are consecutive rows of B from ``first`` on, the others the rows that are used. ``fmas`` are the
    piece's multiply-adds within the tile, ``slot`` the slot that each of them uses.
    """

    first: int
    rows: NDArray[np.int64]  # of B, by slot
    done: NDArray[np.int64]  # multiply-adds up to the last that uses each slot
    fmas: slice
    slot: NDArray[np.int64]


def cut(code: NDArray[np.void], buffers: int, k: int) -> list[RingPiece]:
    """Cut a tile into pieces of about equally many instructions.

    A piece ends at a full turn of the ring, so that the next walk finds each scoreboard at the same slot.
    """
    loads, fmas = filling(code), np.flatnonzero(code["op"] == Op.FMA)
    if not len(fmas):
        return []
    rows = code["source"][loads].astype(np.int64)
    used = last_filled(code, loads, fmas, buffers)
    uses = np.bincount(used, minlength=len(rows))
    behind = np.cumsum(uses + 1)
    laps = np.arange(buffers, len(rows) - buffers + 1, buffers)  # columns before which a piece may begin
    count = pieces_of(int(behind[-1]))
    wished = behind[-1] * np.arange(1, count) / count
    nearest = laps[np.abs(behind[laps - 1][:, np.newaxis] - wished).argmin(axis=0)] if len(laps) else laps
    starts = [0, *np.unique(nearest).tolist()]
    ends = np.searchsorted(used, [*starts[1:], len(rows)]).tolist()
    pieces, before = [], 0
    for start, last, end in zip(starts, [*starts[1:], len(rows)], ends, strict=True):
        pieces.append(_piece(rows[start:last], uses[start:last], slice(before, end), buffers, k))
        before = end
    return pieces


def _piece(rows: NDArray[np.int64], uses: NDArray[np.int64], fmas: slice, buffers: int, k: int) -> RingPiece:
    first = max(min(int(rows[0]), k - buffers), 0)
    head = np.arange(first, first + buffers)
    slots = np.concatenate((head, rows[rows >= first + buffers]))
    place = np.searchsorted(slots, rows)
    used = np.zeros(len(slots), np.int64)
    used[place] = uses
    return RingPiece(first, slots, np.cumsum(used), fmas, np.repeat(place, uses))
