"""Section 5.1.3, loop block reduction: a proxy block repeats the cluster's mean iteration NNC_P times."""

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.ir import TileProgram
from lospmm.codegen.ops import Op
from lospmm.codegen.schedule import parts_of_tile
from lospmm.matrix.csr import SparseMatrix
from lospmm.space.candidates import Schedule, Tiling
from lospmm_proxies.blocks import Cluster, central_tile
from lospmm_proxies.trial import ProxyKernel

#: NNC_P x (1 - sparsity) from which on a thread block's misses of the instruction cache no longer change (Figure 9).
STABLE_DENSE_ITERATIONS = 300

#: Odd, so that its multiples modulo 2^23 do not repeat; near the golden ratio's fraction, so that they are spread.
_MANTISSA_STEP = 5184445
_MANTISSAS = 1 << 23
_ONE = 0x3F800000  # the bits of 1.0f


def iterations(loads: int, matrix: SparseMatrix) -> int:
    """Return NNC_P: min(NNC, 300 / (1 - sparsity)), rounded down."""
    return min(loads, STABLE_DENSE_ITERATIONS * matrix.m * matrix.k // matrix.nnz)


def proxy_block(matrix: SparseMatrix, tiling: Tiling, cluster: Cluster, schedule: Schedule) -> list[TileProgram]:
    """Return PB: the centroid's loads and multiply-adds, cut in proportion, in the kernel's schedule.

    If blocks share a tile there is one program for each of its parts. It reads B and writes C where the cluster's
    most central tile does. Of that tile's columns it reads the first: tiles that run side by side then share as large
    a part of their rows of B as in the kernel, while scattered columns would share fewer, and miss the caches more
    often.
    """
    count = iterations(cluster.loads, matrix)
    rows = central_tile(tiling, cluster, count)
    fmas = round(cluster.fmas * count / cluster.loads)
    columns = _nonempty_columns(matrix, rows)[:count]
    return parts_of_tile(*proxy_iterations(columns, fmas, len(rows)), rows, schedule)


def kept_share(trial: ProxyKernel) -> float:
    """Return the share of its kernel's loads that a proxy executes, about 1 if nothing is cut.

    NNC_P cuts tiles of many loads by more than tiles of few, hence a large M1 by more than a small one: times of
    proxies of different M1 are comparable only after each is divided by its share.
    """
    loads = [block.count(Op.LOAD) for block in trial.program.tiles]
    of_kernel = int(trial.candidate.tiling.nnc.sum())
    return sum(loads[block] for block in trial.program.dispatch) / of_kernel if of_kernel else 1.0


def proxy_iterations(
    columns: NDArray[np.int32], fmas: int, accumulators: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """Return every PI of a block: accumulator, column and weight of each multiply-add, (fmas,).

    Each column has the mean number of multiply-adds, rounded so that no prefix is off by one or more. They cycle over
    the accumulators, as the rows of a column follow one another in a kernel.
    """
    up_to = np.arange(len(columns) + 1, dtype=np.int64) * fmas // len(columns)
    return np.arange(fmas) % accumulators, np.repeat(columns, np.diff(up_to)), distinct_weights(fmas)


def distinct_weights(count: int) -> NDArray[np.float32]:
    """Return weights in (1, 2), distinct up to 2^23 - 1: no multiply-add equals another or an addition."""
    mantissa = np.arange(1, count + 1, dtype=np.int64) * _MANTISSA_STEP % _MANTISSAS
    return (_ONE + mantissa).astype(np.uint32).view(np.float32)


def _nonempty_columns(matrix: SparseMatrix, rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the columns in which any of ``rows`` has a nonzero, ascending."""
    return np.unique(np.concatenate([matrix.indices[matrix.indptr[row] : matrix.indptr[row + 1]] for row in rows]))
