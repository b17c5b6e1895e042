"""Algorithm 1 against a literal transcription, what every tiling must satisfy, and the worked example of the docs."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lospmm.errors import BadRequest
from lospmm.matrix import readers
from lospmm.matrix.csr import SparseMatrix, from_coo, from_dense
from lospmm.space import reorder
from lospmm.space.candidates import Tiling
from lospmm.space.reorder import natural_order, regroup, threads_for
from lospmm_datasets.synthetic import paired_blocks, uniform
from tests.docs.pages import DOCS, blocks
from tests.fixtures.real_layers import REAL_LAYERS, needs_real_layers

REAL_PATTERNS = REAL_LAYERS / "dlmc"


@dataclass
class SlowTile:
    """A_tile with the attributes that Algorithm 1 reads."""

    id: int
    rows: list[int] = field(default_factory=list)
    columns: set[int] = field(default_factory=set)
    nnz: int = 0


def algorithm_1(a: SparseMatrix, m1: int) -> Iterator[tuple[int, list[int], int, list[SlowTile]]]:
    """Line by line as printed. Yields after each row: the row, nnc of every tile merged with it, cid, SA_tile."""
    columns_of_row = [set(a.indices[a.indptr[row] : a.indptr[row + 1]].tolist()) for row in range(a.m)]
    nnz_matrix = a.nnz  # 1
    nnzs_row = [len(columns) for columns in columns_of_row]  # 2
    rows = sorted(range(a.m), key=lambda row: nnzs_row[row])  # 3
    rows = [row for row in rows if nnzs_row[row] > 0]  # 4
    num_a_tile = math.ceil(len(rows) / m1)  # 5
    th_nnz = nnz_matrix / num_a_tile if num_a_tile else 0.0  # 6
    sa_tile = [SlowTile(id) for id in range(num_a_tile)]  # 7
    for row in rows:  # 8
        tsa_tile = [len(tile.columns | columns_of_row[row]) for tile in sa_tile]  # 9
        rsa_tile = sorted(sa_tile, key=lambda tile: tsa_tile[tile.id])  # 10
        cid = None  # 11
        for a_tile in rsa_tile:  # 12
            if len(a_tile.rows) < m1:  # 13
                if cid is None:  # 14
                    cid = a_tile.id  # 15
                if a_tile.nnz < th_nnz:  # 17
                    cid = a_tile.id  # 18
                    break  # 19
        assert cid is not None
        sa_tile[cid].rows.append(row)  # 23
        sa_tile[cid].columns |= columns_of_row[row]
        sa_tile[cid].nnz += nnzs_row[row]
        yield row, tsa_tile, cid, sa_tile


def slow_tiling(matrix: SparseMatrix, size_limit: int) -> list[tuple[list[int], int, int]]:
    steps = list(algorithm_1(matrix, size_limit))
    tiles = steps[-1][3] if steps else []
    return [(sorted(tile.rows), tile.nnz, len(tile.columns)) for tile in tiles]


def as_lists(tiling: Tiling) -> list[tuple[list[int], int, int]]:
    members = [rows.tolist() for rows in tiling.tiles]
    return list(zip(members, tiling.nnz.tolist(), tiling.nnc.tolist(), strict=True))


def check_tiling(matrix: SparseMatrix, tiling: Tiling) -> None:
    """A permutation of the non-empty rows, no tile above M1, and the figures of every tile right."""
    assert np.sort(tiling.rows).tolist() == np.flatnonzero(matrix.row_nnz).tolist()
    assert tiling.empty_rows.tolist() == np.flatnonzero(matrix.row_nnz == 0).tolist()
    csr = matrix.to_scipy()
    for rows, nnz, nnc in zip(tiling.tiles, tiling.nnz, tiling.nnc, strict=True):
        assert 1 <= len(rows) <= tiling.size_limit
        assert np.all(np.diff(rows) > 0)
        part = csr[rows]
        assert (nnz, nnc) == (part.nnz, len(np.unique(part.indices)))


@st.composite
def matrices(draw: st.DrawFn) -> SparseMatrix:
    """Few distinct rows, so that ties are common; more columns than one word of a mask has bits."""
    k = draw(st.sampled_from([1, 3, 8, 64, 150]))
    patterns = draw(st.lists(st.frozensets(st.integers(0, k - 1), max_size=min(k, 80)), min_size=1, max_size=8))
    rows = draw(st.lists(st.sampled_from(patterns), min_size=1, max_size=30))
    dense = np.zeros((len(rows), k), dtype=np.float32)
    for row, columns in enumerate(rows):
        dense[row, list(columns)] = 1
    return from_dense(dense)


@given(matrices(), st.integers(1, 4))
def test_every_size_limit_gives_what_algorithm_1_gives(matrix: SparseMatrix, workers: int) -> None:
    limits = range(1, matrix.m + 3)
    tilings = regroup(matrix, limits, workers=workers)
    assert list(tilings) == list(limits)
    for limit, tiling in tilings.items():
        assert as_lists(tiling) == slow_tiling(matrix, limit)
        assert tiling.size_limit == limit
        check_tiling(matrix, tiling)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.5, 0.8, 0.95]))
def test_random_matrices_too(seed: int, sparsity: float) -> None:
    matrix = uniform(48, 200, sparsity, seed)
    for limit, tiling in regroup(matrix, (2, 5, 7, 16)).items():
        assert as_lists(tiling) == slow_tiling(matrix, limit)


@pytest.mark.parametrize(
    ("light_rows", "light_columns", "limit"), [(2, 1, 2), (50, 2, 51)], ids=["full", "over TH_nnz"]
)
def test_a_tile_that_may_not_take_a_row_is_passed_over_however_few_columns_it_has(
    light_rows: int, light_columns: int, limit: int
) -> None:
    """Equal light rows gather in tile 0; both heavy rows, without a column in common, must go to tile 1."""
    dense = np.zeros((light_rows + 2, 100), dtype=np.float32)
    dense[:-2, :light_columns] = 1
    dense[-2, 10:50] = 1
    dense[-1, 50:90] = 1
    matrix = from_dense(dense)
    tiling = regroup(matrix, [limit])[limit]
    assert tiling.tiles[1][-2:].tolist() == [light_rows, light_rows + 1]
    assert as_lists(tiling) == slow_tiling(matrix, limit)


@pytest.mark.parametrize(("m", "k", "sparsity", "least"), [(40, 900, 0.5, 2**8), (22, 70_000, 0.02, 2**16)])
def test_counts_of_long_rows_do_not_overflow(m: int, k: int, sparsity: float, least: int) -> None:
    matrix = uniform(m, k, sparsity, seed=0)
    assert matrix.row_nnz.min() >= least
    tilings = regroup(matrix, (3, 8, 20))
    assert {limit: as_lists(tiling) for limit, tiling in tilings.items()} == {
        limit: slow_tiling(matrix, limit) for limit in (3, 8, 20)
    }


@given(matrices(), st.integers(1, 32))
def test_natural_order_keeps_the_rows_as_they_come(matrix: SparseMatrix, limit: int) -> None:
    tiling = natural_order(matrix, limit)
    check_tiling(matrix, tiling)
    assert tiling.rows.tolist() == np.flatnonzero(matrix.row_nnz).tolist()
    assert (tiling.sizes[:-1] == limit).all()


def test_a_matrix_of_zeros_has_no_tile() -> None:
    matrix = from_dense(np.zeros((5, 3), dtype=np.float32))
    for tiling in (*regroup(matrix, (1, 2, 9)).values(), natural_order(matrix, 2)):
        assert tiling.tiles == []
        assert tiling.empty_rows.tolist() == [0, 1, 2, 3, 4]


def test_one_row() -> None:
    matrix = from_dense(np.array([[0, 1, 1]], dtype=np.float32))
    assert [as_lists(tiling) for tiling in regroup(matrix, (1, 2)).values()] == [[([0], 2, 2)]] * 2


def test_many_columns_cost_nothing() -> None:
    rows = np.arange(6)
    matrix = from_coo((6, 2**22), rows, rows % 3 * 2**20, np.ones(6))
    assert as_lists(regroup(matrix, [2])[2]) == [([0, 3], 2, 1), ([1, 4], 2, 1), ([2, 5], 2, 1)]


def test_a_matrix_too_large_for_masks_is_refused() -> None:
    diagonal = np.arange(100_000)
    matrix = from_coo((100_000, 100_000), diagonal, diagonal, np.ones(100_000))
    with pytest.raises(BadRequest, match="too many to regroup"):
        regroup(matrix, [32])


def test_values_of_m1_are_taken_in_turns_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = uniform(60, 100, 0.8, seed=2)
    together = regroup(matrix, range(1, 20))
    monkeypatch.setattr(reorder, "WORK_BYTES", 1000)
    in_turns = regroup(matrix, range(1, 20), workers=2)
    assert {limit: as_lists(tiling) for limit, tiling in in_turns.items()} == {
        limit: as_lists(tiling) for limit, tiling in together.items()
    }


def test_only_large_matrices_are_worth_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (uniform(2048, k, 0.999, seed=0) for k in (2047, 2048))
    for cores, expected in ((1, 1), (3, 3), (16, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert (threads_for(small), threads_for(large)) == (1, expected)


def test_no_limits_and_repeated_limits() -> None:
    matrix = uniform(8, 8, 0.5, seed=1)
    assert regroup(matrix, []) == {}
    assert list(regroup(matrix, [4, 2, 4])) == [2, 4]


@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_below_one_is_refused(limit: int) -> None:
    matrix = uniform(4, 4, 0.5, seed=0)
    with pytest.raises(BadRequest, match=f"a tile of at most {limit} rows"):
        regroup(matrix, [4, limit])
    with pytest.raises(BadRequest, match="M1 must be 1 or more"):
        natural_order(matrix, limit)


def page_matrix() -> SparseMatrix:
    """The block of the page: a row number, then x for a nonzero."""
    (block,) = blocks((DOCS / "reordering.md").read_text())
    cells = [line.split()[1:] for line in block.text.splitlines()[1:]]
    return from_dense(np.array([[cell == "x" for cell in row] for row in cells], dtype=np.float32))


def test_the_worked_example_is_figure_5() -> None:
    matrix = page_matrix()
    assert (matrix.m, matrix.k) == (8, 8)
    assert natural_order(matrix, 4).nnc.tolist() == [8, 8]
    tiling = regroup(matrix, [4])[4]
    assert tiling.nnc.tolist() == [5, 5]
    assert sorted(rows.tolist() for rows in tiling.tiles) == [[0, 1, 4, 5], [2, 3, 6, 7]]


@needs_real_layers
def test_real_layers_keep_their_rows_and_no_tile_reads_much_more() -> None:
    """Total nnc may grow, where neighbours in the natural order were alike already; the largest tile's hardly does."""
    for path in sorted(REAL_PATTERNS.rglob("*.smtx")):
        matrix = readers.read(path).matrix
        tiling, natural = regroup(matrix, [32])[32], natural_order(matrix, 32)
        check_tiling(matrix, tiling)
        assert tiling.count == natural.count
        assert tiling.nnc.max() <= 1.1 * natural.nnc.max(), path
        assert tiling.nnc.sum() <= 1.15 * natural.nnc.sum(), path


@pytest.mark.parametrize("load_ratio", [1, 2, 3])
@pytest.mark.parametrize("similarity", [0, 0.3, 0.9])
def test_paired_blocks_are_as_asked(similarity: float, load_ratio: float) -> None:
    matrix = paired_blocks(similarity, load_ratio, seed=3)
    blocks = (matrix.to_scipy().toarray() != 0).reshape(32, 32 * 1024)
    nnz = blocks.sum(axis=1)
    assert (matrix.m, matrix.k) == (1024, 1024)
    assert matrix.sparsity == pytest.approx(0.98, abs=1e-4)
    assert nnz[1::2] / nnz[::2] == pytest.approx(np.full(16, load_ratio), rel=2e-3)
    shared = (blocks[:16] & blocks[16:]).sum(axis=1)
    assert shared / nnz[:16] == pytest.approx(np.full(16, similarity), abs=2e-3)


def test_generators_repeat_with_their_seed() -> None:
    assert uniform(20, 30, 0.9, seed=5) == uniform(20, 30, 0.9, seed=5)
    assert uniform(20, 30, 0.9, seed=5) != uniform(20, 30, 0.9, seed=6)
    assert uniform(20, 30, 0.9, seed=5).nnz == 60
    assert paired_blocks(0.5, 2, seed=5) == paired_blocks(0.5, 2, seed=5)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [((1.5, 1), {}), ((0.5, 1), {"m": 96}), ((0, 3), {"sparsity": 0.3}), ((0.5, -2), {})],
)
def test_impossible_paired_blocks_are_refused(arguments: tuple[float, float], options: dict[str, float]) -> None:
    with pytest.raises(BadRequest):
        paired_blocks(*arguments, seed=0, **options)


def test_impossible_sparsity_is_refused() -> None:
    with pytest.raises(BadRequest, match="must be from 0 to 1"):
        uniform(4, 4, 1.01, seed=0)
