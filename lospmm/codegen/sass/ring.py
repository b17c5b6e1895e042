"""The ring of buffers that loads go round: what fills a buffer, and what uses it."""

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.ir import Op


def filling(code: NDArray[np.void]) -> NDArray[np.intp]:
    """What fills buffers, in the order of the ring."""
    return np.flatnonzero((code["op"] == Op.LOAD) | (code["op"] == Op.COLLECT))


def last_filled(
    code: NDArray[np.void], filled: NDArray[np.intp], users: NDArray[np.intp], buffers: int
) -> NDArray[np.int64]:
    """Of each of ``users``, the number in ``filled`` of the last before it that went to its buffer."""
    before, source = np.searchsorted(filled, users), code["source"][users]
    found: NDArray[np.int64] = source + buffers * ((before - source - 1) // max(buffers, 1))
    return found
