"""Layout of A for tensor cores: panels of rows, and the columns that each needs, in small steps.

A panel is some subgroups of 8 rows. Its columns are taken in steps of ``4 x each``; a step has a mask of the
subgroups with a nonzero in it, and for each of those a fragment, 8 rows x ``4 x each`` columns of weights. Columns
with similar masks share steps, so that few fragments are needed. The rows of B that a block of panels needs are
numbered and cut into slabs; a thread t of four reads only slots that are t modulo 4, which lie in different banks of
shared memory.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lospmm.families.steps import QUAD, deal
from lospmm.matrix.csr import SparseMatrix, from_coo
from lospmm.problem.problem import ceil_div
from lospmm.space.candidates import Tiling
from lospmm.space.reorder import regroup

SUBGROUP = 8

#: From this share of non-empty columns on, regrouping rows gains nothing.
FULL = 0.95

#: From this share of non-empty columns on, all rows of B are staged in order, which is faster than by a list.
WORTH_LISTING = 0.75

#: Nonzeros per column that are examined before all of them.
COLUMNS_SEEN = 8

#: The most rows that are regrouped: the time grows with their square.
MAX_REGROUPED = 16_384


@dataclass(frozen=True, slots=True)
class PanelShape:
    """The layout's parameters.

    ``each`` columns of a step are one thread's; ``depth`` counts the slots of a slab, and the last four hold zeros.
    """

    subgroups: int  # of a panel, at most 8
    panels: int  # of a block
    parts: int  # streams that the steps of a panel are dealt to
    slabs: int
    depth: int
    each: int
    listed: bool  # whether a block numbers only those rows of B that it needs


@dataclass(frozen=True, slots=True, eq=False)
class Panels:
    """All of A in this layout.

    The panels are those of whole blocks; a step is of one slab of one part of a panel, in the order of panels, parts
    and slabs.
    """

    rows: NDArray[np.int32]  # (panels, 8 x subgroups): of A, -1: none
    slots: NDArray[np.int32]  # (blocks, slabs, depth): the row of B, -1: zeros; (0,) where they are not listed
    starts: NDArray[np.uint32]  # (panels x parts x slabs + 1,): the first step
    masks: NDArray[np.uint8]  # (steps,): bit p stands for subgroup p
    gathered: NDArray[np.int32]  # (steps, 4, each): slots of the slab
    weights: NDArray[np.float32]  # (steps, subgroups, 8, 4, each): zeros where the mask has none


def depth_of(columns: int, slabs: int) -> int:
    """Return the slots of a slab, if ``columns`` rows of B are needed."""
    return ceil_div(max(1, ceil_div(columns, slabs)), QUAD) * QUAD + QUAD


@lru_cache(maxsize=16)
def numbered_rows(matrix: SparseMatrix) -> tuple[int, bool]:
    """Return the rows of B that are staged, and whether they are listed: all, unless many are unused."""
    first = _filled_columns(matrix.indices[: COLUMNS_SEEN * matrix.k])
    if first >= WORTH_LISTING * matrix.k:  # the other nonzeros cannot make it fewer
        return matrix.k, False
    filled = _filled_columns(matrix.indices)
    return (filled, True) if filled < WORTH_LISTING * matrix.k else (matrix.k, False)


def _filled_columns(indices: NDArray[np.int32]) -> int:
    return int(np.count_nonzero(np.bincount(indices, minlength=1)))


@lru_cache(maxsize=16)
def rows_of_panels(matrix: SparseMatrix, subgroups: int) -> NDArray[np.int32]:
    """Return each panel's rows of A, (panels, 8 x subgroups), those with most columns first; -1: none."""
    expected = 1 - (1 - matrix.nnz / (matrix.m * matrix.k)) ** SUBGROUP
    regrouped = expected < FULL and matrix.m <= MAX_REGROUPED
    empty = np.flatnonzero(matrix.row_nnz == 0).astype(np.int32)
    if regrouped and matrix.nnz:
        tiles = regroup(matrix, [SUBGROUP])[SUBGROUP]
        eights = np.full((len(tiles.tiles), SUBGROUP), -1, dtype=np.int32)
        for place, tile in enumerate(tiles.tiles):
            eights[place, : len(tile.rows)] = tile.rows
        groups = regroup(_unions(matrix, tiles), [subgroups])[subgroups].tiles
        members = [group.rows for group in sorted(groups, key=lambda group: -group.nnc)]
    else:
        filled = np.flatnonzero(matrix.row_nnz).astype(np.int32)
        eights = np.full((max(1, ceil_div(len(filled), SUBGROUP)), SUBGROUP), -1, dtype=np.int32)
        eights.reshape(-1)[: len(filled)] = filled
        members = np.array_split(np.arange(len(eights), dtype=np.int32), range(subgroups, len(eights), subgroups))
    panels = np.full((len(members), subgroups, SUBGROUP), -1, dtype=np.int32)
    for place, member in enumerate(members):
        panels[place, : len(member)] = eights[member]
    return _with_empty_rows(panels.reshape(len(panels), -1), empty)


def _unions(matrix: SparseMatrix, tiles: Tiling) -> SparseMatrix:
    """Return a matrix of ones whose rows are the non-empty columns of each tile."""
    tile_of_row = np.zeros(matrix.m, dtype=np.int64)
    for place, tile in enumerate(tiles.tiles):
        tile_of_row[tile.rows] = place
    there = np.zeros((len(tiles.tiles), matrix.k), dtype=bool)
    there[tile_of_row[matrix.rows_of_nonzeros()], matrix.indices] = True
    rows, columns = np.nonzero(there)
    return from_coo(there.shape, rows, columns, np.ones(len(rows), np.float32))


def _with_empty_rows(panels: NDArray[np.int32], empty: NDArray[np.int32]) -> NDArray[np.int32]:
    holes = int(np.count_nonzero(panels < 0))
    more = ceil_div(max(0, len(empty) - holes), panels.shape[1])
    panels = np.concatenate([panels, np.full((more, panels.shape[1]), -1, np.int32)])
    panels.reshape(-1)[np.flatnonzero(panels < 0)[: len(empty)]] = empty
    return panels


def pack_panels(matrix: SparseMatrix, shape: PanelShape) -> Panels:
    """Return A in panels. Raises AssertionError if a block needs more rows of B than ``shape`` has slots."""
    rows = rows_of_panels(matrix, shape.subgroups)
    missing = -len(rows) % shape.panels
    rows = np.concatenate([rows, np.full((missing, rows.shape[1]), -1, np.int32)])
    panels, blocks = len(rows), len(rows) // shape.panels

    place = np.zeros(matrix.m, dtype=np.int64)
    place[rows[rows >= 0]] = np.flatnonzero(rows.reshape(-1) >= 0)
    panel, within = np.divmod(place, rows.shape[1])
    cell_of, slots = _slots(matrix, panel // shape.panels, blocks, shape)
    cells = shape.slabs * shape.depth
    # Of each nonzero, its column as one of all panels.
    cell = cell_of[np.repeat(panel // shape.panels, matrix.row_nnz), matrix.indices]
    cell += np.repeat(panel * cells, matrix.row_nnz)
    masks = np.zeros(panels * cells, dtype=np.uint8)
    subgroup = np.repeat((within // SUBGROUP).astype(np.uint8), matrix.row_nnz)
    for bit in range(shape.subgroups):
        masks[cell[subgroup == bit]] |= np.uint8(1 << bit)

    entry = np.flatnonzero(masks)
    step, thread, turn, starts = _steps(entry, masks[entry], panels, shape)
    steps = int(starts[-1])
    step_masks = np.zeros(steps, dtype=np.uint8)
    np.bitwise_or.at(step_masks, step, masks[entry])

    zeros = shape.depth - QUAD + np.arange(QUAD, dtype=np.int32)
    gathered = np.broadcast_to(zeros[:, np.newaxis], (steps, QUAD, shape.each)).copy()
    gathered[step, thread, turn] = entry % shape.depth

    weights = np.zeros((steps, shape.subgroups, SUBGROUP, QUAD, shape.each), dtype=np.float32)
    row_places = QUAD * shape.each
    first = np.zeros(panels * cells, dtype=np.int64)  # the place of a column's weight in row 0 of its panel
    first[entry] = (step * shape.subgroups * SUBGROUP * QUAD + thread) * shape.each + turn
    weights.reshape(-1)[first[cell] + np.repeat(within * row_places, matrix.row_nnz)] = matrix.data
    return Panels(rows, slots, starts.astype(np.uint32), step_masks, gathered, weights)


def _slots(
    matrix: SparseMatrix, block: NDArray[np.int64], blocks: int, shape: PanelShape
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return where each row of B lies in a block, (blocks, k): slab x depth + slot; and each slot's row.

    ``block`` is that of each row of A.
    """
    held = shape.depth - QUAD
    needed = np.ones((blocks, matrix.k), dtype=bool)
    if shape.listed:
        needed[:] = False
        needed[np.repeat(block, matrix.row_nnz), matrix.indices] = True
    number = np.cumsum(needed, axis=1) - 1
    assert number[:, -1].max() < shape.slabs * held, "slots for the rows of B"
    slab, slot = np.divmod(number, held)
    cell = slab * shape.depth + slot
    if not shape.listed:
        return cell, np.zeros(0, np.int32)
    slots = np.full((blocks, shape.slabs * shape.depth), -1, dtype=np.int32)
    of_block, row = np.nonzero(needed)
    slots[of_block, cell[of_block, row]] = row
    return cell, slots.reshape(blocks, shape.slabs, shape.depth)


def _steps(
    entry: NDArray[np.int64], masks: NDArray[np.uint8], panels: int, shape: PanelShape
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return step, thread and turn of each entry (a column of a panel), and the first step of each slab.

    Each of four threads has a queue of its own for a slab.
    """
    thread = entry % shape.depth % QUAD
    queue = entry // shape.depth * QUAD + thread
    step, turn = deal(queue, masks, queues=panels * shape.slabs * QUAD, subgroups=shape.subgroups, each=shape.each)
    last = np.zeros(panels * shape.slabs, dtype=np.int64)
    np.maximum.at(last, queue // QUAD, step + 1)
    count = last.reshape(panels, 1, shape.slabs)
    parts = np.arange(shape.parts)[:, np.newaxis]
    of_part = -(-np.maximum(count - parts, 0) // shape.parts)  # (panels, parts, slabs)
    starts = np.concatenate([[0], np.cumsum(of_part)])
    panel, slab = np.divmod(entry // shape.depth, shape.slabs)
    stream = panel * shape.parts + step % shape.parts
    return starts[stream * shape.slabs + slab] + step // shape.parts, thread, turn, starts
