"""Sums that round to 16 bits after every multiply-add: the bound that is promised, and what a wrong weight shows in."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lospmm.cpu.reference import compare
from lospmm.errors import BadRequest, VerificationFailed
from lospmm.matrix.csr import from_dense
from lospmm.problem.accuracy import ACCURACY, accuracy_of
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES, Dtype
from lospmm.problem.operands import draw_b
from lospmm.problem.problem import SPLITS, Problem
from lospmm.tuning.options import Options

relaxed = settings(deadline=None, max_examples=40)
HALVES = [dtype for dtype in DTYPES.values() if dtype.is_16_bit]
dtypes = st.sampled_from(HALVES)


def rounded_product(dtype: Dtype, a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """C of a kernel whose every multiply-add rounds to the type."""
    sums = np.zeros((len(a), b.shape[1]), dtype=np.float32)
    for column, row in zip(dtype.rounded(a).T, b, strict=True):
        exact = sums.astype(np.float64) + column[:, np.newaxis].astype(np.float64) * row
        sums = np.where(
            column[:, np.newaxis] != 0, dtype.from_storage(dtype.to_storage(exact.astype(np.float32))), sums
        )
    return sums


@relaxed
@given(
    dtypes, st.integers(1, 6), st.integers(1, 900), st.integers(1, 40), st.floats(0, 1), st.integers(0, 99),
    st.sampled_from([1.0, 1e-3, 1e-6]), st.booleans(),
)  # fmt: skip
def test_a_right_kernel_is_accepted_and_the_bound_holds(
    dtype: Dtype, m: int, k: int, n: int, density: float, seed: int, scale: float, first_is_large: bool
) -> None:
    rng = np.random.default_rng(seed)
    a = (np.where(rng.random((m, k)) < density, rng.normal(size=(m, k)), 0) * scale).astype(np.float32)
    a[:, 0] *= 300 if first_is_large else 1  # what follows is lost in its roundings
    assume(dtype.rounded(abs(a).max(keepdims=True)).any() or not a.any())  # else it is refused
    matrix = from_dense(a)
    b = draw_b(matrix, n, seed, dtype)
    c = rounded_product(dtype, a, b)
    problem = Problem(matrix, n, DEVICES["h200"], dtype=dtype, sums=dtype)
    compare(problem, np.arange(n), b, c)
    accuracy, exact = accuracy_of(dtype, problem.rounded_sums), a.astype(np.float64) @ b
    of_product = accuracy.a_rounding + accuracy.b_rounding + accuracy.sum_rounding
    limit = of_product * (abs(a.astype(np.float64)) @ abs(b)) + accuracy.c_rounding * abs(exact)
    # Below the smallest normal number a weight and a sum are off by half a spacing, whatever they are.
    limit += accuracy.unit_roundoff * accuracy.smallest_normal * (problem.rounded_sums + (a != 0) @ abs(b))
    assert (abs(c - exact) <= limit).all()


@relaxed
@given(dtypes, st.integers(0, 999), st.data())
def test_a_negated_weight_is_refused(dtype: Dtype, seed: int, data: st.DataObject) -> None:
    """In rows that are short enough for the type (docs/accuracy.md)."""
    k = data.draw(st.integers(1, 150 if dtype.name == "float16" else 12))
    rng = np.random.default_rng(seed)
    a = (rng.choice([-1.0, 1.0], size=(2, k)) * rng.uniform(0.5, 1.5, size=(2, k))).astype(np.float32)
    matrix, wrong = from_dense(a), a.copy()
    wrong[1, seed % k] *= -1
    b = draw_b(matrix, 64, seed, dtype)
    problem = Problem(matrix, 64, DEVICES["h200"], dtype=dtype, sums=dtype)
    assert problem.rounded_sums == k + SPLITS[-1]
    with pytest.raises(VerificationFailed, match=r"row 1, column \d+: got"):
        compare(problem, np.arange(64), b, rounded_product(dtype, wrong, b))


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.name)
def test_the_promise_grows_with_the_longest_row(dtype: Dtype) -> None:
    u = dtype.unit_roundoff
    assert accuracy_of(dtype) == ACCURACY[dtype.name]
    assert accuracy_of(dtype, 10).sum_rounding == pytest.approx((1 + u) ** 10 - 1)
    assert accuracy_of(dtype, 10).c_rounding == 0  # the last sum is C
    row = from_dense(np.array([[1.0, 2.0, 0.0], [0.0, 1.0, 0.0]]))
    assert Problem(row, 4, DEVICES["h200"], dtype=dtype, sums=dtype).rounded_sums == 2 + SPLITS[-1]
    assert Problem(row, 4, DEVICES["h200"], dtype=dtype).rounded_sums == 0


@pytest.mark.parametrize(
    ("dtype", "sums", "words"),
    [
        ("float16", "bfloat16", "sums 'bfloat16': with dtype float16 choose float32 or float16"),
        ("float32", "float16", "sums 'float16': with dtype float32 choose float32"),
        ("tf32", "tf32", "sums 'tf32': choose one of float32, float16, bfloat16"),
    ],
)
def test_sums_of_another_type_are_refused(dtype: str, sums: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        Options(dtype=dtype, sums=sums)
    if "choose one of" not in words:
        with pytest.raises(BadRequest, match=words):
            Problem(from_dense(np.eye(2)), 4, DEVICES["h200"], dtype=DTYPES[dtype], sums=DTYPES[sums])
