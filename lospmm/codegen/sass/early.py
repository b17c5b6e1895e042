"""Early stores: each row of a tile is stored once its sum is complete, not at the end.

The order of loads stays ascending. Tiles that load in orders of their own, in which rows finish one after another,
take longer: blocks that run at the same time no longer ask for the same rows of B (docs/decisions/0026).

A thread has one register pair, beside that of row 0, to reach far rows of C. If that is not enough for all, rows that
lie together are stored together.
"""

from dataclasses import replace

import numpy as np

from lospmm.codegen.ir import KernelProgram, TileProgram
from lospmm.codegen.ops import WINDOW_BYTES, Op

#: Windows of C that a thread can store to in any order.
FREE_WINDOWS = 2

#: Instructions between the last multiply-add of a row and its store, so that no warp waits for the sum.
DISTANCE = 8


def stored_early(tile: TileProgram, program: KernelProgram) -> TileProgram:
    """Return ``tile`` of ``program`` with each store moved after its sum.

    Returns it unchanged if a residual is added after all sums, if the parts of a tile exchange sums, or without sums.
    """
    is_sum, is_store = np.isin(tile.code["op"], (Op.FMA, Op.FOLD)), tile.code["op"] == Op.STORE
    if program.epilogue.residual or program.split_k > 1 or not is_sum.any():
        return tile
    sums, stores = np.flatnonzero(is_sum), tile.code[is_store]
    last_of = np.zeros(tile.accumulators, np.intp)
    last_of[tile.code["target"][sums]] = sums  # the last write wins
    last = last_of[stores["source"]]
    distance = stores["target"].astype(np.int64) * program.c_row_elements * program.words.stored_bytes
    window = (distance + WINDOW_BYTES // 2) // WINDOW_BYTES
    is_far = int(window.max(initial=0)) >= FREE_WINDOWS
    order = np.lexsort((last, window)) if is_far else np.argsort(last, kind="stable")
    rest = tile.code[~is_store]
    places = np.minimum(np.maximum.accumulate(last[order]) + DISTANCE, len(rest))
    return replace(tile, code=np.insert(rest, places, stores[order]))
