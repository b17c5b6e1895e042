"""What every emitter writes computes what the IR means, bit by bit, and A x B."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lospmm.codegen import emit
from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import lower
from lospmm.cpu import execute
from lospmm.cpu.geometry import Run, geometry_of
from lospmm.cpu.verify import choose_columns, verify_on_cpu
from lospmm.errors import Unsupported
from lospmm.problem.accuracy import SUM_ROUNDING
from lospmm.problem.operands import draw_b
from lospmm.problem.problem import MAX_COLUMNS, Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order
from tests.cpu.drawn import ARCH, DEVICE, LANGUAGES, kernels, random_matrix
from tests.fixtures.interpret import interpret

#: Drawing a problem is slow by Hypothesis' measure, and g++ takes its time.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def assert_bits_equal(problem: Problem, program: KernelProgram, language: str) -> None:
    """The text's result is the interpreter's, also where neither writes anything."""
    geometry = geometry_of(program, cols=48)
    columns = choose_columns(geometry.n, geometry.cols)
    b = draw_b(problem.matrix, len(columns), seed=1)
    c = execute(emit(program, language, ARCH), Run(geometry, columns, b))
    np.testing.assert_array_equal(c, interpret(program, b))


@relaxed
@given(kernels())
def test_ptx_is_the_program_and_computes_the_product(kernel: tuple[Problem, KernelProgram]) -> None:
    problem, program = kernel
    assert_bits_equal(problem, program, "ptx")
    verification = verify_on_cpu(problem, program, emit(program, "ptx", ARCH))
    assert verification.on == "cpu"
    assert verification.max_relative_error <= SUM_ROUNDING


@pytest.mark.parametrize("language", LANGUAGES[1:])
@settings(relaxed, max_examples=6)
@given(kernel=kernels())
def test_cuda_is_the_program_and_computes_the_product(language: str, kernel: tuple[Problem, KernelProgram]) -> None:
    problem, program = kernel
    assert_bits_equal(problem, program, language)
    verify_on_cpu(problem, program, emit(program, language, ARCH))  # the library is already compiled


@relaxed
@given(kernels(), st.data())
def test_ptx_dispatches_a_proxy(kernel: tuple[Problem, KernelProgram], data: st.DataObject) -> None:
    """Several block rows share a tile, in any order, and rows of C may be left out."""
    problem, program = kernel
    repeats = st.lists(st.integers(0, len(program.tiles) - 1), min_size=1, max_size=30)
    assert_bits_equal(problem, replace(program, dispatch=tuple(data.draw(repeats))), "ptx")


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_proxy_leaves_rows_of_c_unwritten(language: str) -> None:
    problem = Problem(random_matrix(12, 9, density=0.4), 50, DEVICE)
    program = lower(problem, UnrolledPlan(TileSize(3, 32), Schedule(4), natural_order(problem.matrix, 3)))
    assert_bits_equal(problem, replace(program, dispatch=(0, 2, 2, 0, 2)), language)


@pytest.mark.parametrize("language", LANGUAGES)
def test_rows_far_apart(language: str) -> None:
    """Offsets pass 2^32 bytes, and the windows of a PTX tile's pointers every few rows."""
    matrix = random_matrix(60, 70, density=0.2)
    problem = Problem(matrix, 20_000_001, DEVICE)
    assert matrix.m * problem.n * 4 > 2**32
    program = lower(problem, UnrolledPlan(TileSize(7, 128), Schedule(6), natural_order(matrix, 7)))
    assert_bits_equal(problem, program, language)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_row_may_be_as_long_as_32_bits_of_bytes(language: str) -> None:
    problem = Problem(random_matrix(6, 7, density=0.5), MAX_COLUMNS, DEVICE)
    program = lower(problem, UnrolledPlan(TileSize(3, 128), Schedule(2), natural_order(problem.matrix, 3)))
    assert_bits_equal(problem, program, language)


def test_a_language_without_a_runtime_is_unsupported() -> None:
    problem = Problem(random_matrix(2, 2, density=1.0), 4, DEVICE)
    program = lower(problem, UnrolledPlan(TileSize(2, 32), Schedule(1), natural_order(problem.matrix, 2)))
    emission: Any = replace(emit(program, "ptx", ARCH), language="wasm")
    with pytest.raises(Unsupported, match=r"'wasm'.*sass, ptx, cuda"):
        verify_on_cpu(problem, program, emission)
