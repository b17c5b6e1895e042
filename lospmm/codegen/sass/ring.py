"""The ring of buffers of loads: which instruction fills a buffer, and which uses it."""

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.ops import Op


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
