"""Random sparse matrices of graphs and discretised equations; the same arguments give the same matrix.

They have what collections such as SuiteSparse have and pruned layers lack: rows of very different lengths, bands and
blocks. Unlike ``synthetic``, this makes no array of size m x k: hundreds of thousands of rows take a second. As there,
weights are 0.5 to 1.5, of either sign.
"""

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadRequest
from lospmm.matrix.csr import SparseMatrix, from_coo

#: Chances of the quarters of an adjacency matrix (Chakrabarti et al., R-MAT, SDM 2004; those of Graph500).
RMAT_CHANCES = (0.57, 0.19, 0.19, 0.05)

#: Neighbours of a grid's point, itself among them, by the name of the stencil.
STENCILS = {
    5: ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)),
    9: tuple((y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)),
    25: tuple((y, x) for y in range(-2, 3) for x in range(-2, 3)),
}


def power_law(nodes: int, mean_degree: float, seed: int, *, exponent: float = 2.1) -> SparseMatrix:
    """Return the adjacency matrix of a scale-free graph: degrees fall as ``degree ** -exponent``.

    Both ends of an edge are random nodes, with probabilities proportional to ``(i + 1) ** (-1 / (exponent - 1))`` for
    i = 0, 1, ... in a random order of nodes (Chung and Lu 2002). Duplicate edges count once, so there are somewhat
    fewer than ``nodes * mean_degree``. Raises BadRequest for an exponent of 2 or less.
    """
    if exponent <= 2:
        raise BadRequest(f"exponent {exponent}: more than 2, or the degrees have no mean")
    random = np.random.default_rng(seed)
    chance = np.arange(1, nodes + 1) ** (-1 / (exponent - 1))
    ends = np.cumsum(chance) / chance.sum()
    count = _count(nodes, nodes, mean_degree)
    row, col = (
        random.permutation(nodes)[np.searchsorted(ends, random.random(count)).clip(max=nodes - 1)] for _ in range(2)
    )
    return _matrix(nodes, nodes, row, col, random)


def rmat(scale: int, mean_degree: float, seed: int) -> SparseMatrix:
    """Return the R-MAT adjacency matrix of 2**scale nodes, drawn quarter by quarter with RMAT_CHANCES.

    As in ``power_law`` there are somewhat fewer nonzeros than requested.
    """
    random = np.random.default_rng(seed)
    nodes = 1 << scale
    count = _count(nodes, nodes, mean_degree)
    row, col = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for _ in range(scale):
        quarter = np.searchsorted(np.cumsum(RMAT_CHANCES), random.random(count)).clip(max=3)
        row, col = row * 2 + quarter // 2, col * 2 + quarter % 2
    return _matrix(nodes, nodes, row, col, random)


def scattered(m: int, k: int, mean_length: float, seed: int) -> SparseMatrix:
    """Return uniformly random entries, as in an Erdős-Rényi graph; somewhat fewer than requested."""
    random = np.random.default_rng(seed)
    count = _count(m, k, mean_length)
    return _matrix(m, k, random.integers(m, size=count), random.integers(k, size=count), random)


def banded(nodes: int, bandwidth: int, mean_length: float, seed: int) -> SparseMatrix:
    """Return entries at most ``bandwidth`` from the full diagonal, as after a Cuthill-McKee reordering."""
    random = np.random.default_rng(seed)
    count = _count(nodes, nodes, max(0.0, mean_length - 1))
    row = random.integers(nodes, size=count)
    col = row + random.integers(-bandwidth, bandwidth + 1, size=count)
    inside = (col >= 0) & (col < nodes)
    diagonal = np.arange(nodes)
    return _matrix(
        nodes, nodes, np.concatenate([diagonal, row[inside]]), np.concatenate([diagonal, col[inside]]), random
    )


def stencil(side: int, points: int, seed: int) -> SparseMatrix:
    """Return the matrix of a ``side`` x ``side`` grid, row by row, with a stencil of ``points`` points.

    Raises BadRequest for a stencil that is not in STENCILS.
    """
    if points not in STENCILS:
        raise BadRequest(f"a stencil of {points} points: choose one of {', '.join(map(str, STENCILS))}")
    random = np.random.default_rng(seed)
    y, x = np.divmod(np.arange(side * side), side)
    rows, cols = [], []
    for down, right in STENCILS[points]:
        inside = (y + down >= 0) & (y + down < side) & (x + right >= 0) & (x + right < side)
        rows.append(np.flatnonzero(inside))
        cols.append(rows[-1] + down * side + right)
    return _matrix(side * side, side * side, np.concatenate(rows), np.concatenate(cols), random)


def blocks(m: int, k: int, block: int, sparsity: float, seed: int) -> SparseMatrix:
    """Return full blocks of ``block`` x ``block`` entries; ``sparsity`` is the share of empty blocks.

    Raises BadRequest for sides that are no multiples of ``block``, and for a sparsity outside 0 to 1.
    """
    if m % block or k % block:
        raise BadRequest(f"{m} x {k} in blocks of {block}: both sides must be multiples of it")
    if not 0 <= sparsity <= 1:
        raise BadRequest(f"sparsity {sparsity}: must be from 0 to 1")
    random = np.random.default_rng(seed)
    across = k // block
    chosen = random.choice(m // block * across, round((1 - sparsity) * (m // block) * across), replace=False)
    inner = np.arange(block)
    top, left = np.divmod(chosen, across)
    shape = (len(chosen), block, block)
    row = np.broadcast_to(top[:, None, None] * block + inner[:, None], shape)
    col = np.broadcast_to(left[:, None, None] * block + inner, shape)
    return _matrix(m, k, row.reshape(-1), col.reshape(-1), random)


def _count(m: int, k: int, mean_length: float) -> int:
    """Return the entries to draw. Raises BadRequest for an impossible mean length of rows."""
    if not 0 <= mean_length <= k:
        raise BadRequest(f"rows of {mean_length} entries in {k} columns: from 0 to {k}")
    return round(m * mean_length)


def _matrix(
    m: int, k: int, row: NDArray[np.integer], col: NDArray[np.integer], random: np.random.Generator
) -> SparseMatrix:
    """Return the matrix of distinct places, each with a random weight."""
    place = np.unique(row.astype(np.int64) * k + col)
    weights = random.choice([-1.0, 1.0], len(place)) * random.uniform(0.5, 1.5, len(place))
    return from_coo((m, k), place // k, place % k, weights)
