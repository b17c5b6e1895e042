"""Kernels of 16-bit elements with float32 sums: they run without a hazard and round what float32 computes, once."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lospmm.codegen import emit
from lospmm.codegen.emission import Emission
from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import lower
from lospmm.codegen.sass.form import NO_BARRIER, Opcode
from lospmm.cpu import execute
from lospmm.cpu.geometry import Run, geometry_of
from lospmm.cpu.rounding import bits_of, values_of
from lospmm.cpu.verify import verify_on_cpu
from lospmm.errors import Unsupported, VerificationFailed
from lospmm.problem.convolution import Convolution
from lospmm.problem.dtype import DTYPES, Dtype
from lospmm.problem.epilogue import epilogue_of
from lospmm.problem.lanes import DOUBLE, NARROW
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order
from tests.cpu.drawn import ARCH, random_matrix
from tests.cpu.drawn_layers import DEVICE, Layer, drawn_matrix, layer_of, layers
from tests.cpu.drawn_machine_code import step_of
from tests.cpu.rounded_oracle import rounded_oracle
from tests.cpu.timed_warp import assert_in_time
from tests.fixtures.covering import covering

NUMBERS = ("float16", "bfloat16")
every_number = pytest.mark.parametrize("number", NUMBERS)


def narrowed(layer: Layer, dtype: Dtype) -> Layer:
    """The same kernel of 16-bit elements, with A, B and the residual rounded to them."""
    problem = replace(layer.problem, dtype=dtype)
    residual = None if layer.residual is None else dtype.rounded(layer.residual)
    program = replace(layer.program, words=NARROW, dtype=dtype)
    return replace(layer, problem=problem, program=program, b=dtype.rounded(layer.b), residual=residual)


def oracle(layer: Layer) -> NDArray[np.float32]:
    return rounded_oracle(layer.program, layer.b, layer.residual)


def check(layer: Layer) -> None:
    geometry = geometry_of(layer.program, cols=0)
    found = execute(emit(layer.program, "sass", ARCH), Run(geometry, layer.columns, layer.hidden_b, layer.residual))
    np.testing.assert_array_equal(found.view(np.uint32), oracle(layer).view(np.uint32))


@settings(max_examples=50, deadline=None)
@given(layers(is_convolution=False, splits=(1, 1, 2, 4)), st.sampled_from(NUMBERS))
def test_a_product_is_rounded_once(layer: Layer, number: str) -> None:
    """Odd columns, rows without a nonzero, deep and shallow rings, loads that are held back, all epilogues."""
    check(narrowed(layer, DTYPES[number]))


@settings(max_examples=40, deadline=None)
@given(layers(splits=(1, 1, 2)), st.sampled_from(NUMBERS))
def test_so_is_a_convolution(layer: Layer, number: str) -> None:
    check(narrowed(layer, DTYPES[number]))


@settings(max_examples=40, deadline=None)
@given(layers(is_convolution=False), st.sampled_from(NUMBERS))
def test_two_columns_to_a_thread_are_those_of_two_threads(layer: Layer, number: str) -> None:
    assume(layer.problem.n % 2 == 0)
    layer = narrowed(layer, DTYPES[number])
    program = replace(layer.program, n=layer.problem.n // 2, words=DOUBLE)
    geometry = geometry_of(program, cols=0)
    emission, words = emit(program, "sass", ARCH), np.arange(layer.problem.n // 2)
    found = execute(emission, Run(geometry, words, layer.b, layer.residual))
    np.testing.assert_array_equal(found.view(np.uint32), oracle(layer).view(np.uint32))


@every_number
@pytest.mark.parametrize(("is_layer", "n"), [(True, 4096), (False, 10_000_002)])
def test_two_columns_of_longer_kernels(number: str, is_layer: bool, n: int) -> None:
    """With windows of addresses, and with as many loads for two columns as for one."""
    problem, program = problem_of(number, n, Schedule(24), is_layer=is_layer)
    both = problem_of(number, n, Schedule(24, thread_words=2), is_layer=is_layer)[1]
    assert (both.n, both.words) == (n // 2, DOUBLE)
    emission = emit(both, "sass", ARCH)
    assert verify_on_cpu(problem, both, emission).columns > 60
    machines = [emission.machine, emit(program, "sass", ARCH).machine]
    loads, multiplied = (
        [np.count_nonzero(code.form["op"] == op) for code in machines if code is not None]
        for op in (Opcode.LDG, Opcode.FFMA_IMM)
    )
    assert loads[0] == loads[1] and multiplied[0] == 2 * multiplied[1]


def test_two_columns_of_what_is_not_written() -> None:
    problem, program = problem_of("float16", 64, Schedule(8, split_k=2))
    with pytest.raises(Unsupported, match="two columns of float16 to a thread: of products, and tiles of one block"):
        emit(replace(program, n=32, words=DOUBLE), "sass", ARCH)
    program = lower(problem, UnrolledPlan(TileSize(20, 32), Schedule(210), natural_order(problem.matrix, 20)))
    with pytest.raises(Unsupported, match="registers a thread: a smaller tile, or less prefetch"):
        emit(replace(program, n=32, words=DOUBLE), "sass", ARCH)


def problem_of(number: str, n: int, schedule: Schedule, *, is_layer: bool = False) -> tuple[Problem, KernelProgram]:
    matrix = random_matrix(20, 300, 0.1, seed=n)
    epilogue = epilogue_of(np.linspace(-1, 1, 20) if is_layer else None, relu=is_layer, residual=is_layer)
    problem = Problem(matrix, n, DEVICE, epilogue=epilogue, dtype=DTYPES[number])
    return problem, lower(problem, UnrolledPlan(TileSize(8, 32), schedule, natural_order(matrix, 8)))


@pytest.mark.parametrize(
    ("number", "n", "schedule"),
    covering(
        NUMBERS,
        [1, 77, 4096, 50_177, 1 << 20, 10_000_001],
        [Schedule(1), Schedule(7), Schedule(72), Schedule(24, split_k=2)],
    ),
    ids=str,
)
def test_longer_kernels(number: str, n: int, schedule: Schedule) -> None:
    """Hundreds of rows of B: with one window of addresses, with some, and with one for each row."""
    problem, program = problem_of(number, n, schedule, is_layer=schedule.prefetch != 7)
    emission = emit(program, "sass", ARCH)
    assert verify_on_cpu(problem, program, emission).columns <= 64
    assert emission.machine is not None
    sizes = emission.machine.form["bytes"][np.isin(emission.machine.form["op"], (Opcode.LDG, Opcode.STG))]
    assert set(sizes.tolist()) == {2}


@every_number
def test_numbers_at_their_ends(number: str) -> None:
    """Subnormals, infinities and NaN among the elements; sums beyond the type become infinite, as cvt rounds them."""
    dtype = DTYPES[number]
    matrix = drawn_matrix(7, 12, 0.6, seed=2)
    problem = Problem(matrix, 40, DEVICE, dtype=dtype)
    program = lower(problem, UnrolledPlan(TileSize(4, 32), Schedule(5), natural_order(matrix, 4)))
    layer = layer_of(problem, program, seed=1)
    ends = values_of(np.array([0, 1, 0x8001, 0x3FF, 0x7BFF, 0xFBFF, 0x7C00, 0x7F80, 0xFF80, 0x7FFF], np.uint32), dtype)
    b = np.random.default_rng(4).choice(ends, layer.b.shape)
    geometry = geometry_of(program, cols=0)
    with np.errstate(invalid="ignore", over="ignore"):
        found = execute(emit(program, "sass", ARCH), Run(geometry, layer.columns, b))
        np.testing.assert_array_equal(found, oracle(replace(layer, b=b)))
    assert np.isinf(found).any() and np.isnan(found).any()


@every_number
@given(st.integers(0, 0xFFFF))
def test_sixteen_bits_there_and_back(number: str, bits: int) -> None:
    value = values_of(np.array([bits], np.uint32), DTYPES[number])
    assert np.isnan(value[0]) or bits_of(value, DTYPES[number])[0] == bits


@every_number
def test_a_conversion_is_hidden_where_a_column_has_many_nonzeros(number: str) -> None:
    """It stands before the multiply-adds of an earlier column: nothing stalls for it but at the start."""
    matrix = random_matrix(16, 64, 0.9)
    problem = Problem(matrix, 64, DEVICE, dtype=DTYPES[number])
    program = lower(problem, UnrolledPlan(TileSize(16, 32), Schedule(24), natural_order(matrix, 16)))
    machine = emit(program, "sass", ARCH).machine
    assert machine is not None
    form = machine.form
    converted = np.flatnonzero(np.isin(form["op"], (Opcode.HADD2_F32, Opcode.SHF_L)))
    assert len(converted) == np.count_nonzero(form["op"] == Opcode.LDG) == 64
    between = form["stall"][converted[2] : converted[-1]]
    assert (between > 2).sum() == 0  # 2: a wait for a scoreboard that was just raised


def small_kernel(number: str) -> tuple[Problem, KernelProgram, Emission]:
    matrix = random_matrix(5, 30, 0.4)
    epilogue = epilogue_of(np.linspace(-1, 1, 5), relu=True, residual=True)
    problem = Problem(matrix, 100, DEVICE, epilogue=epilogue, dtype=DTYPES[number])
    program = lower(problem, UnrolledPlan(TileSize(5, 32), Schedule(9), natural_order(matrix, 5)))
    return problem, program, emit(program, "sass", ARCH)


def mutations(form: NDArray[np.void]) -> Iterator[tuple[str, int, int]]:
    """(field, instruction, other value) for each wait left out, each stall cut and each scoreboard left out."""
    for number, row in enumerate(form):
        for bit in range(6):
            if row["wait"] >> bit & 1:
                yield "wait", number, row["wait"] ^ (1 << bit)
        if row["stall"] > 1 and row["op"] != Opcode.EXIT:
            yield "stall", number, 1
        if row["op"] == Opcode.LDG:
            yield "write_barrier", number, NO_BARRIER


@every_number
def test_each_damaged_control_field_is_refused_or_makes_no_difference(number: str) -> None:
    problem, program, emission = small_kernel(number)
    code = emission.machine
    assert code is not None and code.entry.residual is not None
    starts = (code.entry.b, code.entry.c, code.entry.residual)
    filled = [start + half for start in starts for half in (0, 1)]
    refused = {"wait": 0, "stall": 0, "write_barrier": 0}
    for name, at, value in mutations(code.form):
        damaged = replace(code, form=code.form.copy())
        damaged.form[name][at] = value
        try:
            verify_on_cpu(problem, program, replace(emission, machine=damaged))
        except VerificationFailed as error:
            assert "machine code: tile 0, instruction" in str(error)
            refused[name] += 1
        else:
            assert_in_time([step_of(damaged.form[row : row + 1]) for row in range(len(damaged.form))], filled, seed=at)
    assert refused["wait"] > 5 and refused["stall"] > 3
    assert refused["write_barrier"] == np.count_nonzero(code.form["op"] == Opcode.LDG)


@every_number
@pytest.mark.parametrize(("size", "message"), [(4, "4 bytes, where an element has 2"), (8, "8 bytes, where")])
def test_a_load_of_more_than_an_element_is_refused(number: str, size: int, message: str) -> None:
    problem, program, emission = small_kernel(number)
    assert emission.machine is not None
    form = emission.machine.form.copy()
    loads = np.flatnonzero(form["op"] == Opcode.LDG)
    form["bytes"][loads[-1]], form["rd"][loads[-1]] = size, form["rd"][loads[-1]] & 0xFE
    damaged = replace(emission, machine=replace(emission.machine, form=form))
    with pytest.raises(VerificationFailed, match=message):
        verify_on_cpu(problem, program, damaged)


@every_number
@pytest.mark.parametrize("language", ["ptx", "cuda"])
def test_others_have_no_such_kernels(number: str, language: str) -> None:
    _, program, _ = small_kernel(number)
    with pytest.raises(Unsupported, match=f"narrow of {number}: {language} has no such kernels"):
        emit(program, language, "sm_90")


@every_number
def test_a_real_window_with_padding(number: str) -> None:
    convolution = Convolution(1, 64, 14, 14, 3, 3, padding=(1, 1))
    matrix = drawn_matrix(24, convolution.k, 0.1, seed=4)
    epilogue = epilogue_of(np.linspace(-1, 1, 24), relu=True, residual=True)
    problem = Problem(matrix, convolution.n, DEVICE, convolution, epilogue, DTYPES[number])
    candidate = UnrolledPlan(TileSize(24, 96), Schedule(prefetch=24), natural_order(matrix, 24))
    program = lower(problem, candidate)
    error = verify_on_cpu(problem, program, emit(program, "sass", ARCH)).max_relative_error
    assert 0 < error < 2 * DTYPES[number].unit_roundoff
