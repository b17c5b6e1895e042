"""Each row of a tile is stored as soon as its sum is whole, not with the others at the end.

Elements of B are loaded as they are numbered all the same. Tiles that load them in orders of their own, in which rows
are finished one after another, take longer: blocks that run at the same time no longer ask for the same rows of B
(docs/decisions/0026).

A thread has one register pair beside that of row 0 to reach far rows of C by. Where that is not enough for all, rows
that lie together are stored together.
"""

from dataclasses import replace

import numpy as np

from lospmm.codegen.ir import WINDOW_BYTES, KernelProgram, Op, TileProgram

#: Of the windows of C, those that a thread reaches in any order.
FREE_WINDOWS = 2

#: Instructions between the last multiply-add of a row and its store, so that no warp waits for the sum.
DISTANCE = 8


def stored_early(tile: TileProgram, program: KernelProgram) -> TileProgram:
    """``tile`` of ``program`` with each store behind its sum. Not where a residual is added behind all sums or the
    parts of a tile meet behind them, nor in tiles without sums."""
    is_sum, is_store = np.isin(tile.code["op"], (Op.FMA, Op.FOLD)), tile.code["op"] == Op.STORE
    if program.epilogue.residual or program.split_k > 1 or not is_sum.any():
        return tile
    sums, stores = np.flatnonzero(is_sum), tile.code[is_store]
    last_of = np.zeros(tile.accumulators, np.intp)
    last_of[tile.code["target"][sums]] = sums  # of several the last one stays
    last = last_of[stores["source"]]
    distance = stores["target"].astype(np.int64) * program.c_row_elements * program.words.stored_bytes
    window = (distance + WINDOW_BYTES // 2) // WINDOW_BYTES
    is_far = int(window.max(initial=0)) >= FREE_WINDOWS
    order = np.lexsort((last, window)) if is_far else np.argsort(last, kind="stable")
    rest = tile.code[~is_store]
    places = np.minimum(np.maximum.accumulate(last[order]) + DISTANCE, len(rest))
    return replace(tile, code=np.insert(rest, places, stores[order]))
