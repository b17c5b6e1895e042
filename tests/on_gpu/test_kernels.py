"""Kernels on a real GPU: every element of C against float64, on memory that held NaN before; and bit for bit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lospmm.artifact import kept
from lospmm.artifact.artifact import Artifact
from lospmm.codegen import EMITTERS, emit
from lospmm.codegen.ir import KernelProgram, launch
from lospmm.codegen.lower import lower
from lospmm.codegen.sass.generations import GENERATIONS
from lospmm.errors import Unsupported
from lospmm.gpu import bench as measure
from lospmm.gpu import gate
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device
from lospmm.gpu.protocol import Driver
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order
from lospmm.store import Store
from lospmm.toolchain.compile import Compiled, compile_kernel
from lospmm.tuning import jobs
from lospmm.tuning.build import Build
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request
from tests.fixtures.interpret import interpret

pytestmark = pytest.mark.gpu

#: What the sums of a kernel may be off, relative to |A| |B|: a few units in the last place.
MAX_ERROR = 1e-6


def dense(m: int, k: int, density: float) -> np.ndarray:
    rng = np.random.default_rng(m * k)
    return np.where(rng.random((m, k)) < density, rng.normal(size=(m, k)), 0)


def without_rows(weights: np.ndarray, every: int) -> np.ndarray:
    weights[np.arange(len(weights)) % every != 0] = 0
    return weights


CASES = {
    "a layer": (dense(256, 576, 0.1), 4096),
    "ragged": (dense(100, 147, 0.1), 1003),
    "one column": (dense(64, 64, 0.2), 1),
    "one row": (dense(1, 70, 0.9), 33),
    "long rows": (dense(10, 1500, 0.6), 260),
    "mostly empty rows": (without_rows(dense(512, 128, 0.3), 11), 500),
    "no nonzero": (np.zeros((130, 20)), 77),
    "strides beyond 16 MiB": (dense(6, 40, 0.5), 5_000_000),
    "rows beyond 2 GiB": (dense(5, 60, 0.5), 10_000_000),
}


def tuned(matrix: SparseMatrix, n: int, emitter: str) -> tuple[Problem, Artifact]:
    """Chosen by the estimate: what is tested is the kernel, not the search."""
    problem = Problem(matrix, n, detect_device())
    options = Options(emitter=emitter, measure="none", verify="none")
    return problem, jobs.tune(Request(problem, options), store=kept.open_store())


def skip_without(emitter: str) -> None:
    if emitter == "sass" and detect_device().arch not in GENERATIONS:
        pytest.skip(f"no machine code for {detect_device().arch}")


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("case", CASES)
def test_a_tuned_kernel_is_right_on_the_gpu(case: str, emitter: str) -> None:
    skip_without(emitter)
    weights, n = CASES[case]
    problem, kernel = tuned(from_dense(weights), n, emitter)
    manifest = kernel.manifest
    x, y, z = manifest["launch"]["grid"]
    launch = Launch((x, y, z), manifest["launch"]["block"], manifest["launch"]["shared_bytes"])
    with Bench(problem) as bench:
        found = bench.measure(kernel.cubin, manifest["name"], launch)
    print(case, emitter, found)
    assert found.failure is None
    assert found.max_relative_error is not None and found.max_relative_error < MAX_ERROR


def built(program: KernelProgram, problem: Problem, emitter: str) -> Build:
    emission = emit(program, emitter, problem.device.arch)
    store = Store(settings().cache_dir)
    arch, workers = problem.device.arch, settings().workers
    binary = compile_kernel(emission, arch=arch, registers=program.registers, store=store, workers=workers)
    compiled = Compiled(binary.cubin, program.name, launch(program))
    return Build(emitter, compiled, binary, program.dtype, program.words, program=program, emission=emission)


def run_on(driver: Driver, problem: Problem, kernel: Build) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """B, and C as the kernel leaves it on memory that held NaN."""
    task = measure._prepare(problem, seed=1)
    bench = gate.prepare(task, driver)
    place = bench.operands
    function = driver.load(kernel.binary.cubin, kernel.compiled.entry)
    assert function.registers == kernel.binary.registers

    def enqueue(copy: int) -> None:
        driver.launch(function, kernel.compiled.launch, (np.uint64(place.b[copy]), np.uint64(place.c[copy])))

    verdict = gate.run_and_check(bench, enqueue, copy=0)
    assert verdict.failure is None
    matrix = problem.matrix
    b, c = np.empty((matrix.k, problem.n), np.float32), np.empty((matrix.m, problem.n), np.float32)
    driver.download(b, place.b[0])
    driver.download(c, place.c[0])
    return b, c


#: m, k, density, n, M1, threads, and the rest of the schedule.
SHAPES: dict[str, tuple[int, int, float, int, int, int, dict[str, Any]]] = {
    "small": (20, 30, 0.3, 64, 8, 32, {}),
    "n 1": (20, 30, 0.3, 1, 8, 32, {}),
    "ragged": (64, 200, 0.3, 1003, 16, 256, {}),
    "ragged by a warp": (64, 200, 0.3, 8 * 128 + 32, 16, 128, {}),
    "1024 threads": (64, 200, 0.2, 5000, 24, 1024, {}),
    "1024 threads, one column over": (64, 200, 0.2, 1025, 24, 1024, {}),
    "deep": (48, 400, 0.1, 512, 48, 128, {"prefetch": 72}),
    "one load at a time": (48, 100, 0.2, 512, 16, 128, {"prefetch": 1}),
    "columns fastest": (48, 100, 0.2, 4096, 16, 64, {"column_group": 0}),
    "groups of columns, the last one short": (48, 100, 0.2, 64 * 9 - 5, 16, 64, {"column_group": 4}),
    "every register": (190, 300, 0.05, 256, 190, 64, {"prefetch": 48}),
    "windows": (9, 30, 0.4, 3_000_001, 4, 128, {}),
    "2 blocks to a tile": (64, 200, 0.3, 1000, 16, 128, {"split_k": 2}),
    "4 blocks to a tile, ragged": (70, 500, 0.1, 1003, 32, 160, {"split_k": 4, "column_group": 2}),
    "8 blocks to a tile": (96, 900, 0.1, 784, 48, 416, {"split_k": 8, "prefetch": 24, "column_group": 0}),
    "8 blocks to a tile of fewer rows": (20, 300, 0.02, 300, 3, 64, {"split_k": 8}),
    "2 blocks to a tile of many rows": (190, 300, 0.05, 256, 190, 64, {"split_k": 2, "prefetch": 48}),
    "long rows": (8, 1500, 0.7, 300, 8, 128, {}),
    "long rows, many of them": (20, 600, 0.9, 300, 20, 64, {"prefetch": 12}),
    "long rows, 4 blocks to a tile": (6, 2000, 0.9, 300, 6, 128, {"split_k": 4}),
    "many loads ahead": (120, 300, 0.05, 1003, 60, 128, {"prefetch": 48}),
    "stores in two windows": (48, 60, 0.2, 90_001, 24, 256, {"prefetch": 24}),
    "tall tiles, windows": (16, 60, 0.4, 3_000_001, 9, 128, {}),
    "4 blocks to a tile, windows": (9, 60, 0.4, 3_000_001, 4, 128, {"split_k": 4}),
    "walked twice": (96, 100, 0.2, 1003, 40, 96, {"walks": 2, "prefetch": 15}),
    "walked twice, in pieces": (200, 768, 0.1, 4096, 96, 512, {"walks": 2, "prefetch": 25, "column_group": 2}),
    "walked twice, in many pieces, ragged": (37, 1500, 0.6, 2501, 37, 576, {"walks": 2, "prefetch": 20}),
    "walked twice, windows": (30, 60, 0.5, 400_001, 12, 128, {"walks": 2, "prefetch": 5}),
}


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bit_for_bit_what_the_interpreter_says(driver: Driver, shape: str, emitter: str) -> None:
    """Also where threads without a column leave before the others meet at a barrier."""
    skip_without(emitter)
    m, k, density, n, rows, threads, options = SHAPES[shape]
    problem = Problem(from_dense(dense(m, k, density)), n, detect_device())
    schedule = Schedule(**{"prefetch": 8, **options})
    program = lower(problem, UnrolledPlan(TileSize(rows, threads), schedule, natural_order(problem.matrix, rows)))
    if emitter == "sass":  # registers are what its own allocation says
        program = replace(program, registers=255)
    if max(schedule.split_k, schedule.walks) > 1 and emitter != "sass":
        with pytest.raises(Unsupported):
            built(program, problem, emitter)
        return
    b, c = run_on(driver, problem, built(program, problem, emitter))
    columns = np.unique(np.append(np.linspace(0, n - 1, 3000).astype(np.int64), [n - 1]))
    expected = interpret(program, b[:, columns])
    np.testing.assert_array_equal(c[:, columns].view(np.uint32), expected.view(np.uint32))


def test_machine_code_is_bit_for_bit_that_of_ptx(driver: Driver) -> None:
    """All of C: the same sums in the same order, whoever scheduled them."""
    skip_without("sass")
    problem = Problem(from_dense(dense(128, 256, 0.1)), 1500, detect_device())
    candidate = UnrolledPlan(TileSize(32, 256), Schedule(16), natural_order(problem.matrix, 32))
    program = lower(problem, candidate)
    found = [run_on(driver, problem, built(program, problem, emitter)) for emitter in ("sass", "ptx")]
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1].view(np.uint32), found[1][1].view(np.uint32))
