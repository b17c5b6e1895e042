"""The generators of graph-like matrices: their shapes, their degrees, and the same matrix from the same seed."""

import numpy as np
import pytest

from lospmm.errors import BadRequest
from lospmm.matrix.csr import SparseMatrix
from lospmm_datasets import graphs

DRAWN = {
    "power_law": lambda seed: graphs.power_law(3000, 8, seed),
    "rmat": lambda seed: graphs.rmat(11, 8, seed),
    "scattered": lambda seed: graphs.scattered(2000, 3000, 8, seed),
    "banded": lambda seed: graphs.banded(2000, 20, 8, seed),
    "stencil": lambda seed: graphs.stencil(40, 9, seed),
    "blocks": lambda seed: graphs.blocks(320, 640, 16, 0.9, seed),
}


def places(matrix: SparseMatrix) -> tuple[np.ndarray, np.ndarray]:
    return matrix.rows_of_nonzeros().astype(np.int64), matrix.indices.astype(np.int64)


@pytest.mark.parametrize("name", DRAWN)
def test_the_seed_decides(name: str) -> None:
    first, again, other = (DRAWN[name](seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert (abs(first.data) >= 0.5).all() and (abs(first.data) <= 1.5).all()
    assert abs((first.data > 0).mean() - 0.5) < 0.1


@pytest.mark.parametrize("name", ["power_law", "rmat"])
def test_few_nodes_have_most_edges(name: str) -> None:
    """Of a scale-free graph the longest row is many times the mean; of a random one it is not."""
    matrix = DRAWN[name](0)
    assert matrix.m == matrix.k
    assert 4 <= matrix.nnz / matrix.m <= 8
    for degrees in (matrix.row_nnz, np.bincount(matrix.indices, minlength=matrix.k)):
        assert degrees.max() > 15 * degrees.mean()
        assert np.sort(degrees)[: matrix.m // 2].sum() < degrees.sum() / 4
    even = graphs.scattered(matrix.m, matrix.k, 8, 0)
    assert even.row_nnz.max() < 4 * even.row_nnz.mean()


def test_scattered_has_what_it_was_asked_for() -> None:
    matrix = graphs.scattered(2000, 3000, 8, 0)
    assert (matrix.m, matrix.k) == (2000, 3000)
    assert 15_900 <= matrix.nnz <= 16_000


def test_a_band_keeps_to_its_diagonal() -> None:
    matrix = graphs.banded(2000, 20, 8, 0)
    row, col = places(matrix)
    assert abs(row - col).max() <= 20
    assert set(range(2000)) <= set(row[row == col].tolist())
    assert 6 <= matrix.nnz / matrix.m <= 8


@pytest.mark.parametrize("points", graphs.STENCILS)
def test_a_stencil_has_its_neighbours(points: int) -> None:
    matrix = graphs.stencil(12, points, 0)
    lengths = matrix.row_nnz.reshape(12, 12)
    assert lengths.max() == points and (lengths[2:-2, 2:-2] == points).all()
    assert lengths[0, 0] < points
    row, col = places(matrix)
    assert (matrix.to_scipy().T.astype(bool) != matrix.to_scipy().astype(bool)).nnz == 0
    assert (abs(row % 12 - col % 12) <= 2).all()


def test_blocks_are_full_or_empty() -> None:
    matrix = graphs.blocks(320, 640, 16, 0.9, 0)
    counts = np.bincount((places(matrix)[0] // 16) * 40 + places(matrix)[1] // 16, minlength=20 * 40)
    assert set(counts.tolist()) == {0, 256}
    assert (counts > 0).sum() == 80


@pytest.mark.parametrize(
    ("draw", "says"),
    [
        (lambda: graphs.power_law(10, 4, 0, exponent=2), "exponent 2: more than 2"),
        (lambda: graphs.rmat(3, 9, 0), "rows of 9 entries in 8 columns"),
        (lambda: graphs.stencil(4, 7, 0), "a stencil of 7 points: choose one of 5, 9, 25"),
        (lambda: graphs.blocks(10, 16, 8, 0.5, 0), "10 x 16 in blocks of 8"),
        (lambda: graphs.blocks(16, 16, 8, 1.5, 0), "sparsity 1.5"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw: object, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        draw()  # type: ignore[operator]
