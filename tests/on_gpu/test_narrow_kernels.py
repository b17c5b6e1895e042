"""Kernels of 16-bit elements with float32 sums on a real GPU: bit for bit what the oracle says, behind the gate."""

from dataclasses import replace

import numpy as np
import pytest

from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import lower
from lospmm.codegen.sass.generations import GENERATIONS
from lospmm.gpu.detect import detect_device
from lospmm.gpu.protocol import Driver
from lospmm.matrix.csr import from_dense
from lospmm.problem.convolution import output_elements, unfold
from lospmm.problem.device import DeviceSpec
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import PLAIN, Epilogue, epilogue_of
from lospmm.problem.lanes import DOUBLE, FLOAT_SUMS
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order
from tests.cpu.rounded_oracle import rounded_oracle
from tests.on_gpu.checked_run import run
from tests.on_gpu.test_convolution_kernels import CASES, problem_of, program_of
from tests.on_gpu.test_kernels import SHAPES, dense

pytestmark = pytest.mark.gpu

numbers = pytest.mark.parametrize("number", ["float16", "bfloat16"])


def check(driver: Driver, problem: Problem, program: KernelProgram) -> None:
    """That some columns, the first and the last among them, are what the oracle says, and that the gate agrees."""
    if problem.device.arch not in GENERATIONS:
        pytest.skip(f"no machine code of 16 bits for {problem.device.arch}")
    assert program.words in FLOAT_SUMS
    (b, c, *residual), _ = run(driver, problem, program, "sass")
    n, m, convolution = problem.n, problem.matrix.m, problem.convolution
    columns = np.unique(np.append(np.linspace(0, n - 1, 3000).astype(np.int64), [n - 1]))
    if convolution is None:
        own_b, places = b.reshape(-1, n)[:, columns], np.add.outer(np.arange(m) * n, columns)
    else:
        own_b = unfold(convolution, b, columns)
        places = np.add.outer(np.arange(m) * convolution.pixels, output_elements(convolution, m, columns))
    expected = rounded_oracle(program, own_b, residual[0][places] if residual else None)
    np.testing.assert_array_equal(c[places].view(np.uint32), expected.view(np.uint32))


#: A thread of 16-bit elements walks its code once.
NARROW = [name for name, (*_, options) in SHAPES.items() if "walks" not in options]


def lowered(
    shape: str, number: str, device: DeviceSpec, epilogue: Epilogue = PLAIN, **axes: int
) -> tuple[Problem, KernelProgram]:
    """The product of that name in SHAPES, by a kernel of its schedule and ``axes``."""
    m, k, density, n, rows, threads, options = SHAPES[shape]
    problem = Problem(from_dense(dense(m, k, density)), n, device, epilogue=epilogue, dtype=DTYPES[number])
    schedule = Schedule(**{"prefetch": 8, **options, **axes})
    program = lower(problem, UnrolledPlan(TileSize(rows, threads), schedule, natural_order(problem.matrix, rows)))
    return problem, replace(program, registers=255)


@numbers
@pytest.mark.parametrize("shape", NARROW)
def test_a_product_is_bit_for_bit_what_the_oracle_says(driver: Driver, shape: str, number: str) -> None:
    check(driver, *lowered(shape, number, detect_device()))


#: Of even columns, in tiles of one block, whose threads may have twice the registers.
EVEN = [
    name
    for name in NARROW
    for *_, n, rows, threads, options in [SHAPES[name]]
    if n % 2 == 0 and "split_k" not in options and rows < 99 and threads < 1024
]


@numbers
@pytest.mark.parametrize("shape", EVEN)
@pytest.mark.parametrize("is_layer", [False, True])
def test_so_are_two_columns_to_a_thread(driver: Driver, shape: str, number: str, is_layer: bool) -> None:
    m, *_ = SHAPES[shape]
    epilogue = epilogue_of(np.linspace(-1, 1, m), relu=True, residual=True) if is_layer else PLAIN
    problem, program = lowered(shape, number, detect_device(), epilogue, thread_words=2)
    assert program.words == DOUBLE
    check(driver, problem, program)


@numbers
@pytest.mark.parametrize("name", CASES)
def test_so_is_a_layer(driver: Driver, name: str, number: str) -> None:
    case = CASES[name]
    problem = replace(problem_of(case), dtype=DTYPES[number])
    check(driver, problem, program_of(problem, case))
