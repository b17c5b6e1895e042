"""Convolutions and epilogues on a real GPU: all of C against float64, and bit for bit what the interpreter says."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from lospmm.codegen import EMITTERS, emit
from lospmm.codegen.ir import KernelProgram, launch
from lospmm.codegen.lower import lower
from lospmm.codegen.sass.generations import GENERATIONS
from lospmm.gpu.detect import detect_device
from lospmm.gpu.protocol import Driver
from lospmm.matrix.csr import from_dense
from lospmm.problem.convolution import Convolution, output_elements, unfold
from lospmm.problem.epilogue import PLAIN, Epilogue, epilogue_of
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from tests.fixtures.interpret import interpret
from tests.on_gpu.checked_run import run

pytestmark = pytest.mark.gpu


class Case(NamedTuple):
    m: int
    convolution: Convolution | None  # None: 200 x 1003 of B
    density: float
    tile: TileSize
    schedule: Mapping[str, Any] = MappingProxyType({})
    bias: bool = False
    relu: bool = False
    residual: bool = False


def window(kernel: int, size: tuple[int, int, int], *, batch: int = 3, **way: Any) -> Convolution:
    """A square window on channels x height x width."""
    return Convolution(batch, *size, kernel, kernel, **way)


CASES = {
    "a product with a bias": Case(48, None, 0.1, TileSize(16, 128), {}, bias=True),
    "a product with ReLU": Case(48, None, 0.1, TileSize(16, 128), {}, relu=True),
    "a product with all of it": Case(70, None, 0.1, TileSize(24, 128), {}, True, True, True),
    "a product with all of it, 4 blocks to a tile": Case(
        70, None, 0.1, TileSize(24, 96), {"split_k": 4}, True, True, True
    ),
    "1 x 1": Case(64, window(1, (48, 14, 14)), 0.2, TileSize(16, 128), {}, True, True),
    "1 x 1 with stride 2": Case(64, window(1, (48, 15, 13), stride=(2, 2)), 0.2, TileSize(16, 128), {}, True),
    "3 x 3 without padding": Case(32, window(3, (16, 14, 14)), 0.2, TileSize(16, 128)),
    "3 x 3 with padding 1": Case(32, window(3, (16, 14, 14), padding=(1, 1)), 0.2, TileSize(16, 128)),
    "3 x 3, all of it": Case(40, window(3, (16, 28, 28), padding=(1, 1)), 0.1, TileSize(24, 256), {}, True, True, True),
    "3 x 3 with stride 2": Case(
        40, window(3, (16, 28, 28), padding=(1, 1), stride=(2, 2)), 0.1, TileSize(40, 64), {"prefetch": 48}, True, True
    ),
    "3 x 3 with dilation": Case(
        40, window(3, (9, 20, 23), padding=(2, 3), dilation=(2, 3)), 0.3, TileSize(8, 96), {"prefetch": 4}, False, True
    ),
    "5 x 5 with padding 2, ragged": Case(
        17, window(5, (7, 11, 13), padding=(2, 2), batch=5), 0.2, TileSize(9, 64), {"prefetch": 1}, True, False, True
    ),
    "7 x 7 with padding 3 and stride 2": Case(
        24, window(7, (3, 56, 56), padding=(3, 3), stride=(2, 2)), 0.3, TileSize(24, 256), {"prefetch": 72}, True, True
    ),
    "padding 3 around a window of 2 x 3": Case(
        12, Convolution(2, 5, 6, 4, 2, 3, (1, 2), (3, 3)), 0.5, TileSize(5, 32), {"prefetch": 8}, True, True, True
    ),
    "few nonzeros": Case(30, window(3, (8, 9, 9), padding=(1, 1)), 0.01, TileSize(4, 64), {}, True, True, True),
    "no nonzero": Case(130, window(3, (8, 9, 9), padding=(1, 1)), 0.0, TileSize(20, 64), {}, True, True, True),
    "one pixel": Case(9, window(3, (40, 1, 1), padding=(1, 1), batch=1), 0.3, TileSize(3, 32)),
    "8 blocks to a tile": Case(
        64,
        window(3, (64, 14, 14), padding=(1, 1)),
        0.1,
        TileSize(32, 128),
        {"split_k": 8, "column_group": 0},
        True,
        True,
        True,
    ),
    "2 blocks to a tile, no padding": Case(
        64, window(1, (256, 14, 14)), 0.1, TileSize(32, 128), {"split_k": 2}, True, True, True
    ),
    "images beyond 16 MiB": Case(
        5,
        window(3, (6, 1100, 1100), padding=(1, 1), batch=2),
        0.3,
        TileSize(5, 256),
        {},
        True,
        True,
        True,
    ),
}


def problem_of(case: Case) -> Problem:
    rng = np.random.default_rng(case.m)
    k = 200 if case.convolution is None else case.convolution.k
    weights = np.where(rng.random((case.m, k)) < case.density, rng.normal(size=(case.m, k)), 0)
    bias = np.where(rng.random(case.m) < 0.8, rng.normal(size=case.m), 0) if case.bias else None
    epilogue = epilogue_of(bias, relu=case.relu, residual=case.residual)
    n = 1003 if case.convolution is None else case.convolution.n
    return Problem(from_dense(weights), n, detect_device(), case.convolution, epilogue)


def program_of(problem: Problem, case: Case) -> KernelProgram:
    schedule = Schedule(**{"prefetch": 16, **case.schedule})
    program = lower(problem, UnrolledPlan(case.tile, schedule, natural_order(problem.matrix, case.tile.rows)))
    return replace(program, registers=255)


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("name", CASES)
def test_bit_for_bit_what_the_interpreter_says(driver: Driver, name: str, emitter: str) -> None:
    case = CASES[name]
    problem = problem_of(case)
    if emitter == "sass" and problem.device.arch not in GENERATIONS:
        pytest.skip(f"no machine code for {problem.device.arch}")
    if emitter != "sass" and "split_k" in case.schedule:
        case = case._replace(schedule={})
    program = program_of(problem, case)
    (b, c, *residual), verdict = run(driver, problem, program, emitter)
    assert verdict.max_relative_error < 1e-6
    n, m, convolution = problem.n, problem.matrix.m, problem.convolution
    columns = np.unique(np.append(np.linspace(0, n - 1, 3000).astype(np.int64), [n - 1]))
    if convolution is None:
        own_b, places = b.reshape(-1, n)[:, columns], np.add.outer(np.arange(m) * n, columns)
    else:
        own_b = unfold(convolution, b, columns)
        places = np.add.outer(np.arange(m) * convolution.pixels, output_elements(convolution, m, columns))
    expected = interpret(program, own_b, residual[0][places] if residual else None)
    np.testing.assert_array_equal(c[places], expected)


def test_what_lies_beside_the_input_is_not_read(driver: Driver) -> None:
    """NaN before and behind the input: a load of the padding would bring it in, or read the row before."""
    convolution = window(3, (4, 9, 9), padding=(1, 1), batch=2)
    case = Case(16, convolution, 0.5, TileSize(16, 64))
    problem = problem_of(case)
    program = program_of(problem, case)
    for emitter in ("sass", "ptx") if problem.device.arch in GENERATIONS else ("ptx",):
        arch, store = problem.device.arch, Store(settings().cache_dir)
        binary = compile_kernel(emit(program, emitter, arch), arch=arch, registers=255, store=store, workers=1)
        function = driver.load(binary.cubin, program.name)
        margin = 4096
        memory = np.full(convolution.input_elements + 2 * margin, np.nan, np.float32)
        elements = np.random.default_rng(2).normal(size=convolution.input_elements).astype(np.float32)
        memory[margin:-margin] = elements
        c = np.full(problem.matrix.m * problem.n, np.nan, np.float32)
        b_address, c_address = driver.allocate(memory.nbytes), driver.allocate(c.nbytes)
        driver.upload(b_address, memory)
        driver.upload(c_address, c)
        driver.launch(function, launch(program), (np.uint64(b_address + 4 * margin), np.uint64(c_address)))
        driver.download(c, c_address)
        columns = np.arange(problem.n)
        places = np.add.outer(np.arange(16) * convolution.pixels, output_elements(convolution, 16, columns))
        np.testing.assert_array_equal(c[places], interpret(program, unfold(convolution, elements, columns)))


def test_relu_keeps_nan(driver: Driver) -> None:
    """As torch's does."""
    problem = problem_of(Case(8, None, 0.9, TileSize(8, 64), {}, relu=True))
    assert problem.epilogue == Epilogue(relu=True) != PLAIN
    program = program_of(problem, Case(8, None, 0.9, TileSize(8, 64)))
    arch = problem.device.arch
    binary = compile_kernel(
        emit(program, "sass" if arch in GENERATIONS else "ptx", arch),
        arch=arch,
        registers=255,
        store=Store(settings().cache_dir),
        workers=1,
    )
    function = driver.load(binary.cubin, program.name)
    b = np.full((200, 1003), np.nan, np.float32)
    c = np.zeros((8, 1003), np.float32)
    b_address, c_address = driver.allocate(b.nbytes), driver.allocate(c.nbytes)
    driver.upload(b_address, b)
    driver.upload(c_address, c)
    driver.launch(function, launch(program), (np.uint64(b_address), np.uint64(c_address)))
    driver.download(c, c_address)
    assert np.isnan(c).all()
