"""The order of candidates where nothing is measured, and the features that a rank model will see."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitting import DATA
from fitting.estimate_on_gpu import NAME, PROBLEMS
from fitting.fit_estimate import quality, timed_kernels
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import SPLITS, Problem
from lospmm.space.candidates import COLUMN_GROUPS, Schedule, TileSize, UnrolledPlan
from lospmm.space.estimate import RATES, estimate_micros
from lospmm.space.explore import widen
from lospmm.space.features import FEATURES, FeatureSubject, features, features_of
from lospmm.space.occupancy import resident_blocks
from lospmm.space.ranker import shortlist
from lospmm.space.registers import forecast_registers
from lospmm.space.reorder import regroup
from lospmm.stages import Stages
from lospmm.tuning.unrolled import search

H200 = DEVICES["h200"]


def layer(m: int, k: int, sparsity: float) -> SparseMatrix:
    rng = np.random.default_rng(0)
    return from_dense(np.where(rng.random((m, k)) < 1 - sparsity, rng.normal(size=(m, k)), 0))


def candidate(matrix: SparseMatrix, rows: int, cols: int, prefetch: int) -> UnrolledPlan:
    return UnrolledPlan(TileSize(rows, cols), Schedule(prefetch), regroup(matrix, [rows])[rows])


RESULTS = DATA / NAME


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


def one_by_one(problem: Problem, candidate: UnrolledPlan) -> float:
    """docs/estimate.md, written out for one candidate."""
    device, tile, schedule, tiling = problem.device, candidate.tile, candidate.schedule, candidate.tiling
    split, matrix = schedule.split_k, problem.matrix
    resident = resident_blocks(
        device,
        threads=tile.cols,
        registers_per_thread=forecast_registers(tile.rows, schedule, device),
        shared_bytes=(split - 1) * -(-tile.rows // split) * tile.cols * 4 + 16 * (split > 1),
    )
    sms = device.sms * {1: 132, 2: 132, 4: 120, 8: 120}[split] // 132
    parts, across = tiling.count * split, -(-problem.n // tile.cols)
    blocks = -(-parts * across // sms)
    resident = min(max(resident, 1), blocks)
    all_loads, rows = int(tiling.nnc.sum()), len(tiling.rows)
    loads = all_loads / parts
    instructions = (all_loads + int(tiling.nnz.sum()) + rows + 3 * (split - 1) * rows) / parts
    instructions += len(tiling.empty_rows) * across / sms / blocks

    issue = blocks * instructions * (tile.cols / device.warp_size) / 4
    fetch = blocks * instructions * 16 / (2.1 * resident**0.48 * (1.1 if schedule.column_group != 1 else 1))
    waves = -(-blocks // resident)
    mail = 3400 + (split - 1) * -(-tile.rows // split) * tile.cols * 4 / 14 if split > 1 else 0
    latency = waves * ((1 + loads / schedule.prefetch) * 640 + mail)
    traffic = blocks * loads * tile.cols * 4 / 45
    again = schedule.column_group == 0 and 4 * problem.n * matrix.k > 0.6 * device.l2_bytes
    elements = (max(all_loads, matrix.k) if again else matrix.k) + matrix.m
    memory = 4 * problem.n * elements / device.memory_bandwidth * device.clock_hz
    cycles = sum(cost**3.1 for cost in (issue, fetch, latency, traffic, memory)) ** (1 / 3.1)
    return 2.9 + 1e6 * float(cycles) / device.clock_hz


MATRIX = layer(100, 90, 0.8)
TILINGS = regroup(MATRIX, range(1, 101))

candidates = st.builds(
    lambda rows, cols, schedule: UnrolledPlan(TileSize(rows, cols), schedule, TILINGS[rows]),
    rows=st.integers(1, 100),
    cols=st.integers(1, 32).map(lambda warps: 32 * warps),
    schedule=st.builds(
        Schedule,
        prefetch=st.integers(1, 90),
        column_group=st.sampled_from(COLUMN_GROUPS),
        split_k=st.sampled_from(SPLITS),
    ),
)


@settings(deadline=None)
@given(st.lists(candidates, max_size=8), st.integers(1, 500_000), st.sampled_from(sorted(DEVICES)))
def test_the_estimate_of_many_is_that_of_each(found: list[UnrolledPlan], n: int, device: str) -> None:
    problem = Problem(MATRIX, n, DEVICES[device])
    expected = [one_by_one(problem, candidate) for candidate in found]
    np.testing.assert_allclose(estimate_micros(problem, found), expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("shape", "n", "splits"),
    [((512, 2304), 1568, {2, 4, 8}), ((64, 576), 50_176, {1})],  # deep and narrow; shallow and wide
)
def test_blocks_share_a_tile_where_that_gives_the_gpu_work(shape: tuple[int, int], n: int, splits: set[int]) -> None:
    problem = Problem(layer(*shape, 0.9), n, H200)
    choice = search(problem, estimate_micros, 1, Stages(), splits=SPLITS)
    assert choice.winner.plan.schedule.split_k in splits


def test_features_are_table_1_and_the_axes_and_what_the_estimate_counts() -> None:
    matrix = from_dense(np.array([[1.0, 0, 2], [0, 0, 0], [0, 3.0, 4], [5.0, 0, 6]]))
    row = dict(zip(FEATURES, features(Problem(matrix, 100, H200), [candidate(matrix, 2, 32, 8)])[0], strict=True))
    table_1_and_axes = {
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
        "lockstep": 0,
        "split_k": 1,
    }
    assert {name: row[name] for name in table_1_and_axes} == table_1_and_axes
    assert (row["m"], row["n"], row["column_waste"]) == (4, 100, 1 - 100 / 128)
    assert (row["nnz_over_mean"], row["nnc_over_mean"]) == (4 * 2 / 6, 1.0)  # tiles of 4 and 2 nonzeros, 2 columns each
    assert (row["blocks"], row["resident"], row["waves"], row["balance"]) == (1, 1, 1, 8 / 132)
    assert row["loads_over_prefetch"] == row["loads"] / 8
    # Relative to the least that the product can cost: here B and C, (3 + 4) x 100 numbers, moved once.
    assert row["memory"] == pytest.approx(1.0)
    assert row["estimate_over_least"] == pytest.approx(row["estimate"] * H200.memory_bandwidth / (4 * 7 * 100) / 1e6)


def test_blocks_of_empty_rows_do_not_lighten_those_that_multiply() -> None:
    # Timed on an H200: one tile of 169 rows took twice as long as six of 31, and was forecast to be the faster.
    filled = layer(169, 512, 0.92)
    matrix = SparseMatrix(2048, 512, np.append(filled.indptr, np.full(1879, filled.nnz)), filled.indices, filled.data)
    plans = [(31, 224, 72), (169, 256, 72)]
    for own in (filled, matrix):
        low, high = estimate_micros(Problem(own, 1024, H200), [candidate(own, *plan) for plan in plans])
        assert high > 1.5 * low


def test_features_of_some_are_those_of_all() -> None:
    problem = Problem(layer(96, 128, 0.9), 1024, H200)
    candidates = widen(problem, search(problem, estimate_micros, 1, Stages(), splits=SPLITS).space)
    which = np.random.default_rng(0).choice(len(candidates), 50)
    whole = features(problem, candidates)
    np.testing.assert_array_equal(whole[which], features(problem, candidates.take(which)))
    np.testing.assert_array_equal(whole[which], features_of(FeatureSubject.of(problem, candidates).take(which)))
    np.testing.assert_array_equal(whole[:, list(FEATURES).index("estimate")], estimate_micros(problem, candidates))
    assert np.isfinite(whole).all()
    assert features(problem, []).shape == (0, len(FEATURES))


def test_the_shortlist_is_the_lowest_scores_in_order() -> None:
    assert shortlist(np.array([3.0, 1.0, 2.0, 1.0]), 3) == [1, 3, 2]


def test_the_shortlist_has_the_best_of_each_kind_first() -> None:
    scores = np.array([3.0, 1.0, 2.0, 1.5, 4.0])
    kinds = [np.array([[1, 2], [1, 2], [1, 3], [1, 3], [1, 2]])]
    assert shortlist(scores, 2, kinds) == [1, 3]
    assert shortlist(scores, 3, kinds) == [1, 3, 2]  # fewer kinds than asked for: then the next best
    assert shortlist(scores, 9, kinds) == [1, 3, 2, 0, 4]
    finer = np.array([[0], [1], [2], [2], [3]])
    assert shortlist(scores, 3, [*kinds, finer]) == [1, 3, 0]  # or of each finer kind
    assert shortlist(scores, 5, [*kinds, finer]) == [1, 3, 0, 4, 2]
    assert shortlist(scores, 3, [np.arange(5).reshape(5, 1)]) == [1, 3, 2]


@given(st.lists(st.tuples(st.floats(0, 9), *[st.integers(0, 2)] * 3), min_size=1, max_size=30), st.integers(1, 9))
def test_no_kind_and_no_group_moves_the_first(rows: list[tuple[float, int, int, int]], size: int) -> None:
    scores, *kinds, groups = (np.array(column) for column in zip(*rows, strict=True))
    chosen = shortlist(scores, size, [kind.reshape(-1, 1) for kind in kinds], groups)
    assert chosen[0] == scores.argmin() and len(set(chosen)) == min(size, len(rows))
