"""The bitmap family on the CPU, against float64: every axis of its plans, both types, every epilogue."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.cpu.block import execute_packed
from lospmm.errors import VerificationFailed
from lospmm.families import ONE_COPY, bitmap
from lospmm.families.bitmap import BitmapPlan, fits, forecast, pack_plan, plans, refusal
from lospmm.families.pieces import PieceShape, counts, pack_pieces, piece_bytes
from lospmm.matrix import readers
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import epilogue_of
from lospmm.problem.problem import Problem
from lospmm.problem.values import VALUE_TYPES
from tests.families.matrices import matrices, pruned
from tests.families.products import binary_of, error_of, plain, tokens_first
from tests.fixtures.covering import covering, each_value
from tests.fixtures.real_layers import REAL_LAYERS, needs_real_layers

H200 = DEVICES["h200"]
A100 = DEVICES["a100"]
HALF = DTYPES["float16"]

BASE = BitmapPlan(tiles=2, depth=64, rows=2, parts=2, cluster=1, stages=3, cols=16)

MATRIX = pruned(75, 1100, 0.4, seed=1, empty_rows=0.1, dense_row=True)
PLANS = each_value([plan for n in bitmap.COLS for plan in plans(plain(MATRIX, n, HALF))])


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_axis(plan: BitmapPlan) -> None:
    problem = plain(MATRIX, plan.cols, HALF)
    assert error_of(problem, pack_plan(problem, plan)) < 1


@pytest.mark.parametrize(
    ("dtype", "n"),
    [*(("float16", n) for n in (1, 2, 5, 12, 33, 61)), *(("bfloat16", n) for n in (1, 3, 8))],
)
def test_every_type_and_any_n(dtype: str, n: int) -> None:
    problem = plain(pruned(40, 200, 0.5, seed=2, dense_row=True), n, DTYPES[dtype])
    cols = next((cols for cols in bitmap.COLS if cols >= n), 64)
    assert error_of(problem, pack_plan(problem, replace(BASE, cols=cols, per_bit=1 + n % 2))) < 1


@pytest.mark.parametrize("n", [2, 5, 8, 9, 16])
@pytest.mark.parametrize("is_plain", [False, True])
def test_tokens_first(n: int, is_plain: bool) -> None:
    """Of ragged pieces and of blocks that are not full."""
    epilogue = epilogue_of(None if is_plain else np.linspace(-1, 1, 70), relu=not is_plain, residual=not is_plain)
    problem = Problem(pruned(70, 1110, 0.4, seed=1, empty_rows=0.1), n, H200, epilogue=epilogue, dtype=HALF)
    listed = bitmap.one_copy_plans(problem)
    for plan in (listed[0], listed[-1]):
        assert error_of(problem, tokens_first(pack_plan(problem, plan))) < 1


@pytest.mark.parametrize("n", [1, 3, 8, 12])
def test_generations_without_bulk_copies(n: int) -> None:
    """Asynchronous copies by all lanes, from sm_80 on."""
    problem = Problem(pruned(50, 300, 0.5, seed=3), n, A100, dtype=HALF)
    assert {plan.cluster for plan in plans(problem)} == {1}
    assert error_of(problem, pack_plan(problem, replace(BASE, cols=16 if n > 8 else 8))) < 1


@pytest.mark.parametrize("k", [200, 1107, 3000])  # fewer pieces than are first ones; no multiple of 8; more
def test_kernels_of_every_n_share_one_copy(k: int) -> None:
    matrix = pruned(40, k, 0.5, seed=12, dense_row=True)
    data = set()
    for n in (1, 8, 13, 24, 72):
        problem = plain(matrix, n, HALF)
        found = ONE_COPY["bitmap"].plans(problem)
        for plan in (found[0], found[-1]):
            kernel = pack_plan(problem, plan)
            data.add(kernel.data)
            if plan is found[0] or k == 1107:
                assert error_of(problem, kernel) < 1, (n, plan)
    assert len(data) == 1


@pytest.mark.parametrize(("relu", "residual", "bias", "cluster"), covering(*3 * [[False, True]], [1, 2]))
def test_every_epilogue(relu: bool, residual: bool, bias: bool, cluster: int) -> None:
    epilogue = epilogue_of(np.linspace(-1, 1, 37) if bias else None, relu=relu, residual=residual)
    problem = Problem(pruned(37, 130, 0.3, seed=4, empty_rows=0.3), 16, H200, epilogue=epilogue, dtype=HALF)
    assert error_of(problem, pack_plan(problem, replace(BASE, cluster=cluster))) < 1


@pytest.mark.slow
@settings(max_examples=6)
@given(
    matrices(max_m=70, max_k=200),
    st.sampled_from([3, 8, 12]),
    st.sampled_from(["float16", "bfloat16"]),
)
def test_any_matrix(matrix: SparseMatrix, n: int, dtype: str) -> None:
    problem = plain(matrix, n, DTYPES[dtype])
    plan = BitmapPlan(tiles=2, depth=64, rows=1, parts=2, cluster=2, stages=2, cols=8 if n <= 8 else 16)
    assert error_of(problem, pack_plan(problem, plan)) < 1


@settings(max_examples=30)
@given(
    matrices(max_m=90, max_k=300),
    st.sampled_from([(1, 128), (2, 64), (4, 128)]),
    st.sampled_from([(2, 16), (2, 32), (1, 16)]),
)
def test_the_pieces_hold_the_matrix(matrix: SparseMatrix, shape: tuple[int, int], kind: tuple[int, int]) -> None:
    """Bits and values, read one by one, are A again; no piece is larger than its place in shared memory."""
    (tiles, depth), (per_bit, cols) = shape, kind
    plan = replace(BASE, tiles=tiles, depth=depth, cols=cols, per_bit=per_bit)
    placed = depth // 8 if (per_bit, cols) == (2, 16) else 0
    starts, data = pack_pieces(matrix, HALF, plan.shape, plan.block_rows)
    across, height, words = -(-matrix.k // depth), tiles * 16, tiles * depth // 2 // per_bit
    tall = -(-matrix.m // plan.block_rows) * plan.block_rows
    assert len(starts) == tall // height * across + 1 and starts[-1] * 4 == len(data)
    assert (np.diff(starts.astype(np.int64)) * 16).max() <= piece_bytes(counts(matrix, per_bit), plan.shape)
    found, sides = np.zeros((tall, across * depth), dtype=np.float32), (depth // 64, tiles, 4)
    for piece, (start, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        held = data[start * 4 : end * 4]
        bits = np.unpackbits(held[:words].view(np.uint8), bitorder="little")
        if per_bit == 1:  # of a word: four bytes with a bit for each of eight lanes
            bits = bits.reshape(words, 4, 8).swapaxes(1, 2).ravel()
        (places,) = np.nonzero(bits)
        column = np.arange(depth)
        if placed:
            column[1::2] = held[words:][:placed].view(np.uint8)
        assert (np.sort(column) == np.arange(depth)).all() and (column % 8 == np.arange(depth) % 8).all()
        values = held[words + placed :].view(np.float16)[: len(places) * per_bit].astype(np.float32)
        if per_bit == 1:
            unit, tile, step, half, row, quad, lower, odd = np.unravel_index(places, (*sides, 2, 8, 4, 2, 2))
        else:
            unit, tile, step, row, quad, half, lower, odd = np.unravel_index(places, (*sides, 8, 4, 2, 2, 1))
        at_row = piece // across * height + tile * 16 + lower * 8 + row
        at_column = unit * 64 + step * 16 + half * 8 + quad * 2 + odd
        for place in range(per_bit):
            found[at_row, piece % across * depth + column[at_column + place]] = values[place::per_bit]
    assert np.array_equal(found[: matrix.m, : matrix.k], HALF.rounded(matrix.to_scipy().toarray()))
    assert not found[matrix.m :].any() and not found[:, matrix.k :].any()


def test_weights_that_round_to_zero_take_no_value() -> None:
    weights = np.full((32, 64), 1e-9, dtype=np.float32)
    weights[3, 5], weights[4, 7] = 2.0, -1e-9
    starts, data = pack_pieces(from_dense(weights), HALF, BASE.shape, 32)
    assert starts.tolist() == [0, (128 + 32 + 16) // 16]
    assert np.count_nonzero(data[:32]) == 1 and data[40:].tolist() == [0x4000 << 16, 0, 0, 0]


@pytest.mark.parametrize(
    ("zeros", "single", "adjacent", "paired", "coded"),
    [(0.5, 1.13, 1.56, 1.41, 0.63), (0.7, 0.73, 1.08, 0.95, 0.43), (0.8, 0.53, 0.78, 0.69, 0.33)],
)
def test_bytes_of_an_element(zeros: float, single: float, adjacent: float, paired: float, coded: float) -> None:
    """The figures of docs/families.md."""
    matrix = pruned(128, 1024, 1 - zeros, seed=12)
    for per_bit, is_paired, values, expected in (
        (1, False, None, single),
        (2, True, None, paired),
        (2, False, None, adjacent),
        (1, False, VALUE_TYPES["int8"], coded),
    ):
        _, data = pack_pieces(matrix, HALF, PieceShape(1, 128, per_bit, is_paired), 16, values)
        assert data.nbytes / (128 * 1024) == pytest.approx(expected, abs=0.015)


def test_odd_columns_are_put_where_fewest_pairs_are_left() -> None:
    """Column 9 has nonzeros where column 0 has, as column 1 where column 8 has: they change places."""
    weights = np.zeros((32, 64), dtype=np.float32)
    weights[:8, [0, 9]], weights[8:16, [8, 1]] = 1.0, 1.0
    starts, data = pack_pieces(from_dense(weights), HALF, BASE.shape, 32)
    assert data[32:40].view(np.uint8)[[0, 4]].tolist() == [9, 1]
    assert (starts[1] - starts[0]) * 16 == 128 + 32 + 16 * 4


@pytest.mark.parametrize(("m", "k", "density"), [(1, 1, 1.0), (1, 600, 0.1), (600, 1, 0.5), (9, 5, 0.0)])
def test_small_and_odd_matrices(m: int, k: int, density: float) -> None:
    problem = plain(pruned(m, k, density, seed=5), 16, HALF)
    for plan in plans(problem)[:: max(1, len(plans(problem)) // 2)]:
        assert error_of(problem, pack_plan(problem, plan)) < 1


def test_what_is_not_a_number_stays_in_its_column() -> None:
    """Zeros of a fragment are multiplied too, so a row of C may show what only another row of its tile takes."""
    problem = plain(pruned(16, 100, 0.3, seed=6, dense_row=True), 16, HALF)
    b = np.ones((100, 16), np.float32)
    b[70, 5] = np.nan
    c = execute_packed(pack_plan(problem, BASE), np.arange(16), b, m=16)
    takes = problem.matrix.to_scipy().toarray()[:, 70] != 0
    assert np.isnan(c[takes, 5]).all() and not np.isnan(np.delete(c, 5, axis=1)).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("n", [2, 40])
@pytest.mark.parametrize(("m", "k"), [(512, 1024), (1, 1), (8, 5000)])
def test_plans_fit(dtype: str, n: int, m: int, k: int) -> None:
    problem = plain(pruned(m, k, 0.5, seed=7), n, DTYPES[dtype])
    found = plans(problem)
    assert found and len(set(found)) == len(found)
    assert all(fits(plan, problem, piece_bytes(counts(problem.matrix, plan.per_bit), plan.shape)) for plan in found)
    micros = forecast(problem, found)
    assert micros.shape == (len(found),) and (micros > 0).all() and np.isfinite(micros).all()


def test_a_denser_matrix_is_forecast_to_take_longer() -> None:
    thin, dense = (plain(pruned(2048, 4096, density, seed=8), 8, HALF) for density in (0.1, 1.0))
    assert forecast(thin, plans(thin)).min() < forecast(dense, plans(dense)).min()


def test_what_it_has_no_kernel_for() -> None:
    matrix = pruned(4, 9, 0.5, seed=9)
    assert refusal(plain(matrix, 8)) == "needs a 16-bit dtype, not float32"
    assert "sm_75" in str(refusal(Problem(matrix, 8, DEVICES["rtx2080ti"], dtype=HALF)))
    assert "sm_80 has no warpgroup instructions" in str(refusal(Problem(matrix, 72, A100, dtype=HALF)))
    assert "n 66 is not a multiple of 8" in str(refusal(Problem(matrix, 66, H200, dtype=HALF)))
    assert refusal(Problem(matrix, 64, A100, dtype=HALF)) is None


@pytest.mark.parametrize(
    ("device", "n"),
    [
        ("h200", 33),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("a100", 3), ("h200", 12), ("a100", 32), ("a100", 64))
        ),
    ],
)
def test_the_tightest_plans_do_not_spill(device: str, n: int) -> None:
    problem = Problem(pruned(1024, 1024, 0.5, seed=10), n, DEVICES[device], dtype=HALF)
    kernel = pack_plan(problem, max(plans(problem), key=lambda plan: bitmap.registers_needed(plan, problem)))
    binary = binary_of(kernel, problem.device.arch)
    assert (binary.spill_bytes, binary.stack_bytes) == (0, 0)


def test_a_block_that_has_ended_is_not_read() -> None:
    """What the GPU would not forgive: a block of a cluster that goes while others still read its sums."""
    problem = plain(pruned(16, 300, 0.5, seed=11), 8, HALF)
    kernel = pack_plan(problem, BitmapPlan(tiles=2, depth=64, rows=1, parts=2, cluster=2, stages=2, cols=8))
    never = replace(kernel, source=kernel.source.replace("lospmm_cluster_leave();", ";"))
    assert error_of(problem, kernel) < 1
    with pytest.raises(VerificationFailed, match="shared memory of a block that has ended"):
        execute_packed(never, np.arange(8), np.ones((300, 8), np.float32), m=16)


@needs_real_layers
def test_real_layers() -> None:
    for path in sorted(REAL_LAYERS.rglob("*.npz"))[::4]:
        problem = plain(readers.read(path).matrix, 16, HALF)
        assert error_of(problem, pack_plan(problem, replace(BASE, parts=4))) < 1, path
