"""Gather, multiply, scatter: ``O[o[p],f] += I[i[p],c] * W[w[p],c,f]``, as in sparse 3-D convolutions.

Rows of the output go to tiles, in which rows with the same w are together. A tile has a slot for every w that any of
its rows has, with the row of I for each of its rows: a small dense product for tensor cores. No row of the output is
in two tiles, so nothing is scattered.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.einsums.expression import TensorAccess, parse, shape_of_text
from lospmm.einsums.operands import Operands
from lospmm.families.packed import TEMPLATES, PackedKernel, pack, source_of_prelude
from lospmm.problem.dtype import Dtype
from lospmm.problem.epilogue import PLAIN
from lospmm.problem.launch import Launch
from lospmm.problem.problem import ceil_div

FORM = "O[o[p],f] += I[i[p],c] * W[w[p],c,f]"

#: Rows of a tile, and warps of a block.
POINTS = 32
WARPS = 4

#: Registers of a thread: some four blocks to an SM.
REGISTERS = 168

#: Limits of 32-bit counts: rows of the output and slots; columns of the output, and rows of W.
MAX_COUNT = 2**31 - 1

_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Slots of all tiles; ``rows[s, r]`` is the row of I for row r of slot s's tile, or -1."""

    starts: NDArray[np.int64]  # (tiles + 1,)
    weights: NDArray[np.int64]  # (slots,), the w of each
    rows: NDArray[np.int32]  # (slots, POINTS)
    outputs: NDArray[np.int32]  # (tiles, POINTS), rows of O, or -1


def make_slots(o: NDArray[np.int64], i: NDArray[np.int64], w: NDArray[np.int64], rows: int) -> Slots:
    """Return the slots: rows of O with the same set of w are together, repeated w of a row get more slots."""
    kinds, kind = np.unique(w, return_inverse=True)
    has = np.zeros(rows, dtype=np.uint64)
    np.bitwise_or.at(has, o, np.uint64(1) << (kind % 64).astype(np.uint64))
    order = np.argsort(has, kind="stable")
    tiles = ceil_div(rows, POINTS)
    outputs = np.full(tiles * POINTS, -1, dtype=np.int32)
    outputs[:rows] = order
    position = np.empty(rows, dtype=np.int64)
    position[order] = np.arange(rows)
    tile, lane = np.divmod(position[o], POINTS)
    # Entries by (tile, w, row); which one of its kind an entry is, and then by (tile, w, which one).
    first = np.lexsort((lane, kind, tile))
    key = (tile[first] * len(kinds) + kind[first]) * POINTS + lane[first]
    begins = np.concatenate(([True], key[1:] != key[:-1]))[: len(key)]
    which = np.arange(len(key)) - np.maximum.accumulate(np.where(begins, np.arange(len(key)), 0))
    whole = key // POINTS
    by_slot = np.lexsort((which, whole))
    slot_key = np.stack((whole[by_slot], which[by_slot]))
    is_new = np.concatenate(([True], (slot_key[:, 1:] != slot_key[:, :-1]).any(axis=0)))[: len(key)]
    slot = np.cumsum(is_new) - 1
    count = int(is_new.sum())
    found = np.full((count, POINTS), -1, dtype=np.int32)
    entry = first[by_slot]
    found[slot, lane[entry]] = i[entry]
    own = slot_key[0][is_new]
    starts = np.concatenate(([0], np.cumsum(np.bincount(own // max(1, len(kinds)), minlength=tiles))))
    weights = kinds[own % max(1, len(kinds))]
    return Slots(starts.astype(np.int64), weights, found, outputs.reshape(tiles, POINTS))


def kernel_of_gathered(operands: Operands, dtype: Dtype) -> PackedKernel | None:
    """Return the kernel, or None for an expression of another form or sizes that vectors do not divide."""
    factors = operands.expression.factors
    if len(factors) != 2:
        return None
    for swapped in (False, True):
        left, right = factors[::-1] if swapped else factors
        if shape_of_text(operands.expression.output, (left, right)) == _SHAPE:
            return _kernel(operands, left, right, dtype)
    return None


def _kernel(operands: Operands, left: TensorAccess, right: TensorAccess, dtype: Dtype) -> PackedKernel | None:
    size, inputs = dtype.element_bytes, operands.inputs
    rows, columns = operands.output_shape
    depth = operands.shapes[left.name][1]
    own = next((width for width in (_BYTES // size, _BYTES // size // 2) if depth % (4 * width) == 0), None)
    run = next(
        (width for width in (8, 4, 2) if width * size <= _BYTES and columns % width == 0 and 4 * width < columns), None
    )
    if left.name not in inputs or own is None or run is None or depth == 0 or rows == 0:
        return None
    output = operands.expression.output
    o, i, w = (operands.indices[access.indices[0].name] for access in (output, left, right))
    slots = make_slots(o, i, w, rows)
    tiles, wide = len(slots.outputs), ceil_div(columns, 8 * run)
    if max(tiles * wide, len(slots.weights), depth * columns) > MAX_COUNT:
        return None
    is_known = right.name in operands.values
    settings: dict[str, int | str] = {
        "POINTS": POINTS,
        "WARPS": WARPS,
        "TILES": f"{tiles}u",
        "WIDE": f"{wide}u",
        "DEPTH": f"{depth}u",
        "COLUMNS": f"{columns}u",
        "OWN": own,
        "RUN": run,
        "IS_KNOWN": int(is_known),
        "IS_SWAPPED": int(inputs[0] == right.name),
    }
    arrays = [slots.starts.astype(np.uint32), slots.weights.astype(np.int32), slots.rows, slots.outputs]
    if is_known:
        arrays.append(dtype.to_storage(operands.values[right.name]))
    prelude = source_of_prelude(settings, dtype=dtype, epilogue=PLAIN, takes_residual=not is_known)
    return PackedKernel(
        entry="lospmm_gather_gemm",
        source=prelude + (TEMPLATES / "gather_gemm.cu").read_text(),
        data=pack((), arrays, epilogue=PLAIN),
        launch=Launch((ceil_div(tiles * wide, WARPS), 1, 1), 32 * WARPS),
        registers=REGISTERS,
        cols=32 * WARPS,
        dtype=dtype,
        takes_residual=not is_known,
    )


_PARSED = parse(FORM)
_SHAPE = shape_of_text(_PARSED.output, _PARSED.factors)
