"""Bits made fragments of warpgroups, on the CPU against float64: every axis and epilogue, and what ptxas makes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.cpu.block import execute_packed
from lospmm.errors import VerificationFailed
from lospmm.families import bitmap
from lospmm.families.bitmap_wide import WideBitmap, pack_plan, plans
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import epilogue_of
from lospmm.problem.problem import Problem
from tests.families.matrices import matrices, pruned
from tests.families.products import binary_of, error_of, plain, tokens_first
from tests.fixtures.covering import covering, each_value

H200 = DEVICES["h200"]
HALF = DTYPES["float16"]
BASE = WideBitmap(groups=1, cols=64, cluster=1)

#: More chunks than the ring has stages, the last of them not whole.
MATRIX = pruned(200, 1110, 0.4, seed=1, empty_rows=0.1, dense_row=True)
PLANS = each_value(plans(plain(MATRIX, 264, HALF)))


@pytest.mark.parametrize(("plan", "dtype"), [(plan, "float16") for plan in PLANS] + [(PLANS[-1], "bfloat16")], ids=str)
def test_every_axis(plan: WideBitmap, dtype: str) -> None:
    """Two blocks of the largest, ragged ones."""
    problem = plain(MATRIX, 264, DTYPES[dtype])
    assert error_of(problem, pack_plan(problem, plan)) < 1


@pytest.mark.parametrize(("relu", "residual", "bias", "cluster"), covering(*3 * [[False, True]], [1, 2]))
def test_every_epilogue(relu: bool, residual: bool, bias: bool, cluster: int) -> None:
    epilogue = epilogue_of(np.linspace(-1, 1, 70) if bias else None, relu=relu, residual=residual)
    problem = Problem(pruned(70, 300, 0.3, seed=4, empty_rows=0.3), 72, H200, epilogue=epilogue, dtype=HALF)
    assert error_of(problem, pack_plan(problem, WideBitmap(1, 64, cluster))) < 1


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("is_plain", [False, True])
def test_tokens_first(plan: WideBitmap, is_plain: bool) -> None:
    epilogue = epilogue_of(None if is_plain else np.linspace(-1, 1, 200), relu=not is_plain, residual=not is_plain)
    problem = Problem(pruned(200, 1112, 0.4, seed=1, empty_rows=0.1), 264, H200, epilogue=epilogue, dtype=HALF)
    assert error_of(problem, tokens_first(pack_plan(problem, plan))) < 1


@pytest.mark.parametrize(("sms", "cluster", "along"), [(9, 1, 1), (18, 2, 1), (72, 2, 4), (90, 2, 5)])
def test_a_block_takes_several_tiles(sms: int, cluster: int, along: int) -> None:
    """On a small GPU: three groups of tiles along the columns, the last of which has fewer, by nine along the rows.

    Of 27 tiles, two blocks of a cluster share the last one, or the last three, or there are too many left to share.
    """
    small = replace(H200, sms=sms)
    problem = replace(plain(pruned(550, 130, 0.4, seed=12, empty_rows=0.1), 64 * 25 + 8, HALF), device=small)
    kernel = pack_plan(problem, replace(BASE, cluster=cluster))
    assert kernel.launch.grid == (9, cluster, along)
    assert error_of(problem, kernel) < 1


def test_clusters_are_planned_where_they_share_a_tile() -> None:
    """Of nine clusters: each one more, or none."""
    shared = WideBitmap(groups=1, cols=128, cluster=2)
    for tiles, is_planned in ((27, True), (18, False), (28, False)):
        problem = replace(plain(pruned(64 * tiles, 300, 0.4, seed=13), 72, HALF), device=replace(H200, sms=18))
        assert (shared in plans(problem)) == is_planned


@pytest.mark.slow
@settings(max_examples=8)
@given(matrices(max_m=140, max_k=300), st.integers(9, 20), st.sampled_from(["float16", "bfloat16"]))
def test_any_matrix(matrix: SparseMatrix, eights: int, dtype: str) -> None:
    problem = plain(matrix, 8 * eights, DTYPES[dtype])
    assert error_of(problem, pack_plan(problem, BASE)) < 1


@pytest.mark.parametrize(("m", "k", "density"), [(1, 1, 1.0), (600, 1, 0.5), (9, 5, 0.0)])
def test_small_and_odd_matrices(m: int, k: int, density: float) -> None:
    problem = plain(pruned(m, k, density, seed=5), 72, HALF)
    assert error_of(problem, bitmap.pack_plan(problem, bitmap.plans(problem)[-1])) < 1


def test_rows_behind_b_are_not_read() -> None:
    """Where k is no multiple of a chunk, a copy ends with B, and zeros take its place."""
    problem = plain(from_dense(np.ones((16, 100), np.float32)), 72, HALF)
    c = execute_packed(pack_plan(problem, BASE), np.arange(72), np.ones((100, 72), np.float32), m=16)
    assert (c == 100).all()


def test_a_piece_that_never_comes_is_noticed() -> None:
    """What would hang on a GPU: a warp that waits for a piece that nobody copies."""
    problem = plain(pruned(16, 300, 0.5, seed=11), 72, HALF)
    kernel = pack_plan(problem, BASE)
    fetching = "      fetch(slots + slot * PIECE_BYTES, full + slot, rows, piece, start, end);"
    never = replace(kernel, source=kernel.source.replace(fetching, ""))
    assert never.source != kernel.source
    with pytest.raises(VerificationFailed, match="waits for others that never come"):
        execute_packed(never, np.arange(72), np.ones((300, 72), np.float32), m=16)


@pytest.mark.parametrize(("m", "k", "n"), [(4096, 512, 512), (1, 1, 72), (8, 5000, 4096)])
def test_plans_fit(m: int, k: int, n: int) -> None:
    """An SM has one block, since it has one map of B."""
    problem = plain(pruned(m, k, 0.5, seed=7), n, HALF)
    found = bitmap.plans(problem)
    assert found and len(set(found)) == len(found)
    micros = bitmap.forecast(problem, found)
    assert micros.shape == (len(found),) and (micros > 0).all() and np.isfinite(micros).all()
    for plan in found[:: max(1, len(found) // 3)]:
        launch = pack_plan(problem, plan).launch
        assert H200.shared_bytes_per_sm // 2 <= launch.shared_bytes <= H200.shared_bytes_per_block


@pytest.mark.parametrize("cluster", [1, 2])
def test_the_tightest_plans_do_not_spill(cluster: int) -> None:
    problem = plain(pruned(1024, 1024, 0.5, seed=10), 512, HALF)
    kernel = pack_plan(problem, WideBitmap(2, 256, cluster))
    for one in (kernel, tokens_first(kernel)):
        binary = binary_of(one, problem.device.arch)
        assert (binary.spill_bytes, binary.stack_bytes) == (0, 0)
