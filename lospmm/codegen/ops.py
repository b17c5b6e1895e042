"""The instructions of a tile's program (``ir``), as rows of a table."""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Op(IntEnum):
    """Opcodes of the instruction table; ``INSTRUCTION`` says what each field holds."""

    LOAD = 0
    FMA = 1
    STORE = 2
    SEND = 3
    EXCHANGE = 4
    COLLECT = 5
    BEGIN = 6
    RESIDUAL = 7
    ADD = 8
    FOLD = 9


#: One instruction. LOAD: target = buffer, source = k. FMA: target = accumulator, source = buffer, weight.
#: STORE: target = row of C, source = accumulator, or ZERO for a row that no nonzero touches. SEND: target = slot,
#: source = accumulator. EXCHANGE: once in every part. COLLECT: target = buffer, source = slot, one of the part's own.
#: BEGIN and ADD: target = accumulator, weight. RESIDUAL: target = accumulator, source = row.
#: FOLD: target = accumulator, source = the second one.
INSTRUCTION = np.dtype([("op", "u1"), ("target", "<i4"), ("source", "<i4"), ("weight", "<f4")])

#: The source of a Store that writes zero without an accumulator.
ZERO = -1

#: A load or store reaches 8 MiB either side of an address.
WINDOW_BYTES = 1 << 24


def filling(code: NDArray[np.void]) -> NDArray[np.intp]:
    """Return the instructions that fill buffers, in the order of the ring."""
    return np.flatnonzero((code["op"] == Op.LOAD) | (code["op"] == Op.COLLECT))


def last_filled(
    code: NDArray[np.void], filled: NDArray[np.intp], users: NDArray[np.intp], buffers: int
) -> NDArray[np.int64]:
    """Return, for each of ``users``, the index in ``filled`` of the last fill of its buffer before it."""
    before, source = np.searchsorted(filled, users), code["source"][users]
    found: NDArray[np.int64] = source + buffers * ((before - source - 1) // max(buffers, 1))
    return found
