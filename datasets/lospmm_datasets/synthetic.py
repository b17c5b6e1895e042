"""Random sparse matrices: the same arguments give the same matrix."""

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadRequest
from lospmm.matrix.csr import SparseMatrix, from_coo


def uniform(m: int, k: int, sparsity: float, seed: int) -> SparseMatrix:
    """Return an (m, k) matrix with round((1 - sparsity) * m * k) uniformly random nonzeros.

    Raises BadRequest for a sparsity outside 0 to 1.
    """
    random = np.random.default_rng(seed)
    return _matrix(m, k, random.choice(m * k, _count(m, k, sparsity), replace=False), random)


def uneven(
    m: int,
    k: int,
    sparsity: float,
    seed: int,
    *,
    rows: float = 0.0,
    columns: float = 0.0,
    empty_rows: float = 0.0,
    empty_columns: float = 0.0,
) -> SparseMatrix:
    """Return as many nonzeros as ``uniform``, with some rows and columns denser than others.

    The chance of a row (a column) is log-normal; ``rows`` and ``columns`` are the standard deviations of its
    logarithm. ``empty_rows`` and ``empty_columns`` are shares that have no nonzeros at all. Raises BadRequest as
    ``uniform`` does, and if the others have too few cells.
    """
    random = np.random.default_rng(seed)
    chance = np.exp(rows * random.standard_normal((m, 1))) * np.exp(columns * random.standard_normal(k))
    dead_rows, dead_columns = round(empty_rows * m), round(empty_columns * k)
    if _count(m, k, sparsity) > (m - dead_rows) * (k - dead_columns):
        raise BadRequest(f"sparsity {sparsity} with {dead_rows} empty rows and {dead_columns} empty columns: no room")
    if dead_rows or dead_columns:
        chance[random.choice(m, dead_rows, replace=False)] = 0
        chance[:, random.choice(k, dead_columns, replace=False)] = 0
    return _likeliest(chance, sparsity, random)


def clustered(m: int, k: int, sparsity: float, seed: int, *, block: int = 16, contrast: float = 1.0) -> SparseMatrix:
    """Return as many nonzeros as ``uniform``, with some blocks of ``block`` x ``block`` cells denser.

    The chance of a block is log-normal, ``contrast`` the standard deviation of its logarithm. Raises BadRequest as
    ``uniform`` does.
    """
    random = np.random.default_rng(seed)
    blocks = np.exp(contrast * random.standard_normal((-(-m // block), -(-k // block))))
    return _likeliest(blocks.repeat(block, axis=0).repeat(block, axis=1)[:m, :k], sparsity, random)


def pruned_low_rank(m: int, k: int, sparsity: float, seed: int, *, rank: int = 16, noise: float = 0.5) -> SparseMatrix:
    """Return a magnitude-pruned product of random factors of ``rank`` with normal noise.

    Its pattern follows rows and columns as in a trained layer. ``noise`` is relative to the product. Raises
    BadRequest as ``uniform`` does.
    """
    random = np.random.default_rng(seed)
    factors = [random.standard_normal((side, rank), dtype=np.float32) for side in (m, k)]
    weights = np.zeros((m, k), np.float32)
    # As a BLAS with fused multiply-adds in sequence computes it, but the same on every machine.
    for one, other in zip(*(factor.T.astype(np.float64) for factor in factors), strict=True):
        weights = (np.multiply.outer(one, other) + weights).astype(np.float32)
    weights *= np.float32(rank**-0.5)
    weights += np.float32(noise) * random.standard_normal((m, k), dtype=np.float32)
    return _first(-np.abs(weights), sparsity, random)


def paired_blocks(
    similarity: float,
    load_ratio: float,
    seed: int,
    *,
    m: int = 1024,
    k: int = 1024,
    sparsity: float = 0.98,
    block_rows: int = 32,
) -> SparseMatrix:
    """Return the blocks of section 4.3: of ``block_rows`` rows, each with a partner half the matrix below.

    ``similarity``, R, is the share of a block's nonzeros that its partner has in the same position of the block; the
    partner's others are where the block has none. ``load_ratio`` is the nnz of blocks 1, 3, 5, ... over that of
    blocks 0, 2, 4, ...; partners have the same nnz. Raises BadRequest when the figures do not allow such a matrix.
    """
    blocks, rest = divmod(m, block_rows)
    if rest or blocks % 4:
        raise BadRequest(f"{m} rows in blocks of {block_rows}: the number of blocks must be a multiple of 4")
    cells = block_rows * k
    light = 2 * (1 - sparsity) * cells / (1 + load_ratio)
    block_nnz = (round(light), round(light * load_ratio))
    if not 0 <= similarity <= 1 or min(block_nnz) < 0 or max(block_nnz) * (2 - similarity) > cells:
        raise BadRequest(
            f"similarity {similarity}, load ratio {load_ratio} and sparsity {sparsity}: "
            f"two blocks of {max(block_nnz)} nonzeros do not fit in {cells} cells"
        )
    random = np.random.default_rng(seed)
    upper, lower = [], []
    for block in range(blocks // 2):
        nnz = block_nnz[block % 2]
        shared = round(similarity * nnz)
        cell = random.choice(cells, 2 * nnz - shared, replace=False)
        upper.append(block * cells + cell[:nnz])
        lower.append((block + blocks // 2) * cells + cell[nnz - shared :])
    return _matrix(m, k, np.concatenate(upper + lower), random)


def _count(m: int, k: int, sparsity: float) -> int:
    """Return the number of nonzeros. Raises BadRequest for a sparsity outside 0 to 1."""
    if not 0 <= sparsity <= 1:
        raise BadRequest(f"sparsity {sparsity}: must be from 0 to 1")
    return round((1 - sparsity) * m * k)


def _likeliest(chance: NDArray[np.float64], sparsity: float, random: np.random.Generator) -> SparseMatrix:
    """Draw cells without replacement with the given chances: the earliest of exponential arrival times."""
    arrival: NDArray[np.float32] = random.standard_exponential(chance.shape, dtype=np.float32)
    with np.errstate(divide="ignore"):  # cells without a chance never arrive
        arrival /= chance.astype(np.float32)
    return _first(arrival, sparsity, random)


def _first(score: NDArray[np.float32], sparsity: float, random: np.random.Generator) -> SparseMatrix:
    """Return nonzeros at the least ``score`` (m, k); of equal ones the last, as np.argpartition's depend on the CPU."""
    m, k = score.shape
    count = _count(m, k, sparsity)
    if count in (0, m * k):
        return _matrix(m, k, np.arange(count), random)
    flat = score.ravel()
    highest = np.partition(flat, count - 1)[count - 1]
    below, equal = np.flatnonzero(flat < highest), np.flatnonzero(flat == highest)
    return _matrix(m, k, np.sort(np.append(below, equal[len(below) - count :])), random)


def _matrix(m: int, k: int, position: NDArray[np.int64], random: np.random.Generator) -> SparseMatrix:
    """Return nonzeros at ``position`` = row * k + column, with magnitudes of 0.5 to 1.5, as after pruning."""
    row, col = np.divmod(position, k)
    sign = random.choice([-1.0, 1.0], len(position))
    return from_coo((m, k), row, col, sign * random.uniform(0.5, 1.5, len(position)))
