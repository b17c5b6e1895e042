"""Which columns are computed, and what counts as right."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lospmm.codegen import emit
from lospmm.codegen.lower import lower
from lospmm.cpu.reference import compare
from lospmm.cpu.verify import MAX_COLUMNS, choose_columns, verify_on_cpu
from lospmm.errors import VerificationFailed
from lospmm.matrix.csr import from_dense
from lospmm.problem.operands import draw_b
from lospmm.problem.problem import Problem, ceil_div
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order
from tests.cpu.drawn import DEVICE, LANGUAGES, random_matrix, two_tiles

COLUMNS = np.arange(3)


@given(st.integers(1, 10**7), st.integers(1, 1024))
def test_columns_touch_both_ends_of_the_first_a_middle_and_the_last_block(n: int, cols: int) -> None:
    columns = choose_columns(n, cols)
    assert len(columns) <= MAX_COLUMNS
    assert np.all(np.diff(columns) > 0)
    assert columns[0] >= 0
    assert columns[-1] < n
    last = ceil_div(n, cols) - 1
    for block in (0, last // 2, last):
        assert {block * cols, min((block + 1) * cols, n) - 1} <= set(columns.tolist())


@pytest.mark.parametrize("limit", [6, 12, 30])
def test_no_more_columns_are_chosen_than_the_limit(limit: int) -> None:
    assert len(choose_columns(10**6, 128, limit)) <= limit


def test_few_columns_are_all_computed() -> None:
    assert choose_columns(64, 32).tolist() == list(range(64))


def test_an_element_that_cancels_is_measured_by_its_terms() -> None:
    matrix = from_dense(np.array([[1.0, 1.0]]))
    b = np.array([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]], dtype=np.float32)
    error = compare(Problem(matrix, 3, DEVICE), COLUMNS, b, np.full((1, 3), 2e-6, dtype=np.float32))
    assert error == pytest.approx(1e-6)


def test_an_element_without_terms_is_exactly_zero() -> None:
    matrix = from_dense(np.array([[0.0, 0.0], [1.0, 0.0]]))
    b = np.ones((2, 3), dtype=np.float32)
    c = np.array([[0.0, -0.0, 0.0], [1.0, 1.0, 1.0]], dtype=np.float32)
    assert compare(Problem(matrix, 3, DEVICE), COLUMNS, b, c) == 0.0
    c[0, 2] = 1e-45
    with pytest.raises(VerificationFailed, match=r"row 0, column 2: got 1.40\S+e-45, expected 0.0"):
        compare(Problem(matrix, 3, DEVICE), COLUMNS, b, c)


def test_rows_that_were_not_written_are_named() -> None:
    matrix = random_matrix(60, 8, density=0.5)
    b = draw_b(matrix, 3, seed=0)
    c = (matrix.to_scipy() @ b).astype(np.float32)
    assert compare(Problem(matrix, 3, DEVICE), COLUMNS, b, c) < 1e-6
    c[[3, 4, 5, 9], 1] = np.nan
    with pytest.raises(VerificationFailed, match=r"rows never written: 3-5, 9$"):
        compare(Problem(matrix, 3, DEVICE), COLUMNS, b, c)
    c[::2] = np.nan
    with pytest.raises(VerificationFailed, match=r"rows never written: 0, 2-6, .* and \d+ more$"):
        compare(Problem(matrix, 3, DEVICE), COLUMNS, b, c)


def test_an_infinity_is_wrong() -> None:
    matrix = from_dense(np.ones((1, 1)))
    c = np.array([[1.0, np.inf, 1.0]], dtype=np.float32)
    with pytest.raises(VerificationFailed, match=r"row 0, column 1: got inf, expected 1.0"):
        compare(Problem(matrix, 3, DEVICE), COLUMNS, np.ones((1, 3), dtype=np.float32), c)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("magnitude", [3e38, 1e-42])
def test_the_largest_and_the_smallest_weights(language: str, magnitude: float) -> None:
    """Sums that could overflow, and terms below the normal numbers."""
    matrix = from_dense(np.random.default_rng(0).uniform(0.5, 1.0, size=(3, 50)) * magnitude)
    problem = Problem(matrix, 20, DEVICE)
    program = lower(problem, UnrolledPlan(TileSize(3, 32), Schedule(4), natural_order(matrix, 3)))
    verify_on_cpu(problem, program, emit(program, language, "sm_90"))


def test_the_same_seed_draws_the_same_b() -> None:
    problem, program, emission = two_tiles("ptx")
    first, second, other = (verify_on_cpu(problem, program, emission, seed=seed) for seed in (7, 7, 8))
    assert first == second != other


@pytest.mark.parametrize("language", LANGUAGES)
def test_how_much_of_a_kernel_has_run_is_told(language: str) -> None:
    """Some of these take minutes. CUDA C++ is run by another process, which tells hundredths."""
    told: list[tuple[int, int]] = []
    problem, program, emission = two_tiles(language)
    verify_on_cpu(problem, program, emission, progress=lambda *parts: told.append(parts))
    if language == "cuda":
        assert told == sorted(told) and {total for _, total in told} == {100}
    else:
        parts = 3 if language == "ptx" else 2  # with the empty row
        assert told == [(done, parts) for done in range(parts)]
