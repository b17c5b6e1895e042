"""The order of candidates where nothing is measured, and the features that a rank model will see."""

from pathlib import Path

import numpy as np

from benchmarks.estimate_on_gpu import PROBLEMS
from benchmarks.fit_estimate import quality, timed_kernels
from lospmm.device import DEVICES
from lospmm.estimate import RATES, estimate_micros
from lospmm.features import FEATURES, features
from lospmm.matrix import SparseMatrix, from_dense
from lospmm.model import Candidate, Problem, Schedule, TileSize
from lospmm.ranker import shortlist
from lospmm.reorder import regroup

H200 = DEVICES["h200"]


def layer(m: int, k: int, sparsity: float) -> SparseMatrix:
    rng = np.random.default_rng(0)
    return from_dense(np.where(rng.random((m, k)) < 1 - sparsity, rng.normal(size=(m, k)), 0))


def candidate(matrix: SparseMatrix, rows: int, cols: int, prefetch: int) -> Candidate:
    return Candidate(TileSize(rows, cols), Schedule(prefetch), regroup(matrix, [rows])[rows])


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "estimate_on_gpu.jsonl"


def test_the_estimate_orders_the_kernels_that_were_timed_on_a_gpu() -> None:
    groups = timed_kernels(RESULTS)
    assert len(groups) == len(PROBLEMS) and sum(map(len, groups.values())) >= 150
    for name, kernels in groups.items():
        found = quality(kernels, RATES)
        assert found["rank_correlation"] > 0.6, name
        assert found["mean_error"] < 0.3, name
        assert found["chosen_over_best"] < 1.35, name


def test_no_estimate_is_below_the_memory_bound() -> None:
    matrix = layer(64, 64, 0.99)
    problem = Problem(matrix, 50_176, H200)
    bound = 1e6 * 4 * problem.n * (64 + 64) / H200.memory_bandwidth
    assert np.all(estimate_micros(problem, [candidate(matrix, rows, 256, 8) for rows in (1, 8, 64)]) >= bound)


def test_features_are_table_1() -> None:
    matrix = from_dense(np.array([[1.0, 0, 2], [0, 0, 0], [0, 3.0, 4], [5.0, 0, 6]]))
    row = dict(zip(FEATURES, features(Problem(matrix, 100, H200), [candidate(matrix, 2, 32, 8)])[0], strict=True))
    assert row == {
        "row_tiles": 2,
        "column_tiles": 4,
        "block_count": 12,  # two tiles and the block of the empty row, four columns of blocks
        "sparsity": 0.5,
        "nnc_sum": 4,  # rows 0 and 3 share their columns and so a tile
        "nnz_max": 4,
        "rows": 2,
        "cols": 32,
        "k": 3,
        "prefetch": 8,
        "column_group": 1,
    }


def test_the_shortlist_is_the_lowest_scores_in_order() -> None:
    assert shortlist(np.array([3.0, 1.0, 2.0, 1.0]), 3) == [1, 3, 2]


def test_the_shortlist_has_the_best_of_each_kind_first() -> None:
    scores = np.array([3.0, 1.0, 2.0, 1.5, 4.0])
    assert shortlist(scores, 2, "aabba") == [1, 3]
    assert shortlist(scores, 3, "aabba") == [1, 3, 2]  # fewer kinds than asked for: then the next best
    assert shortlist(scores, 9, "aabba") == [1, 3, 2, 0, 4]
    assert shortlist(scores, 3, "abcde") == [1, 3, 2]
