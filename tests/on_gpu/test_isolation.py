"""A bad cubin of each kind costs itself and its worker alone: the next kernel of the same bench is measured."""

from collections.abc import Iterator

import psutil
import pytest

from lospmm.gpu.bench import Bench
from lospmm.gpu.messages import Measurement
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from tests.on_gpu.bad_kernels import BODIES, ENTRY, planted, with_illegal_instruction
from tests.on_gpu.problems import good_kernel, problem

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def case() -> Problem:
    return problem(65, 96, 1003)


@pytest.fixture(scope="module", params=["cuda-core", "pycuda"])
def bench(request: pytest.FixtureRequest, case: Problem) -> Iterator[Bench]:
    if request.param == "pycuda":
        pytest.importorskip("pycuda", reason="PyCUDA is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOSPMM_DRIVER", request.param)
        patch.setenv("LOSPMM_MEASURE_SECONDS", "15")
        settings.cache_clear()
        with Bench(case) as bench:
            yield bench
        settings.cache_clear()


def assert_a_good_kernel_is_measured(bench: Bench) -> Measurement:
    measured = bench.measure(*good_kernel(bench.problem))
    assert measured.failure is None
    assert measured.timing is not None and 0.5 < measured.timing.micros < 1000
    assert measured.max_relative_error is not None and measured.max_relative_error < 1e-6
    return measured


def cubin_of(kind: str, case: Problem) -> bytes:
    arch = case.device.arch
    if kind in BODIES:
        return planted(kind, arch)
    good = good_kernel(case)[0]
    return {
        "illegal instruction": with_illegal_instruction(planted("zeros", arch)),
        "truncated": good[: len(good) // 2],
        "not a cubin": b"\0" * 4096,
        "empty": b"",
        "another entry": good,
    }[kind]


#: What the failure must say. What a driver makes of half a file is its own affair, so long as it is a failure.
REASONS = {
    "illegal address": ("CUDA_ERROR_ILLEGAL_ADDRESS",),
    "misaligned address": ("CUDA_ERROR_MISALIGNED_ADDRESS",),
    "trap": ("CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_ILLEGAL_INSTRUCTION"),
    "illegal instruction": ("CUDA_ERROR_ILLEGAL_INSTRUCTION",),
    "does nothing": ("rows not written in every column: 0, 1, 2",),
    "zeros": ("rows not written in every column: 0, 1, 2",),
    "truncated": ("CUDA_ERROR_", "the process ended"),
    "not a cubin": ("CUDA_ERROR_", "the process ended"),
    "empty": ("CUDA_ERROR_", "the process ended"),
    "another entry": ("CUDA_ERROR_NOT_FOUND",),
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_bad_cubin_costs_itself_alone(bench: Bench, case: Problem, kind: str) -> None:
    assert_a_good_kernel_is_measured(bench)
    measured = bench.measure(cubin_of(kind, case), ENTRY, Launch((8, 1, 1), 125))  # 8 x 125: columns 0 to 999
    print(f"{kind}: {measured.failure}")
    assert measured.timing is None
    assert measured.failure is not None and any(reason in measured.failure for reason in REASONS[kind])
    assert_a_good_kernel_is_measured(bench)


def test_a_kernel_that_leaves_rows_unwritten_is_refused(bench: Bench) -> None:
    """The good kernel, started without its last block row, which writes the zeros of the empty row."""
    cubin, entry, launch = good_kernel(bench.problem)
    measured = bench.measure(cubin, entry, Launch((launch.grid[0], launch.grid[1] - 1, launch.grid[2]), launch.block))
    assert measured.failure == f"rows not written in every column: {bench.problem.matrix.m - 1}"
    assert_a_good_kernel_is_measured(bench)


def test_a_kernel_of_zeros_in_every_element_is_refused(bench: Bench, case: Problem) -> None:
    every = case.matrix.m * case.n
    measured = bench.measure(planted("zeros", case.device.arch), ENTRY, Launch((every // 59, 1, 1), 59))  # 59 x 17 = n
    assert measured.failure is not None and "relative error" in measured.failure
    assert_a_good_kernel_is_measured(bench)


def test_a_hang_ends_with_its_time(bench: Bench, case: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_a_good_kernel_is_measured(bench)
    worker = psutil.Process(bench._worker.pid) if bench._worker is not None else None
    monkeypatch.setenv("LOSPMM_MEASURE_SECONDS", "3")
    settings.cache_clear()
    measured = bench.measure(planted("hang", case.device.arch), ENTRY, Launch((8, 1, 1), 125))
    assert measured.failure == "no answer within 3 s"
    assert worker is not None and not worker.is_running()
    monkeypatch.setenv("LOSPMM_MEASURE_SECONDS", "15")
    settings.cache_clear()
    assert_a_good_kernel_is_measured(bench)


def test_too_many_threads_are_refused_and_the_worker_kept(bench: Bench, case: Problem) -> None:
    assert_a_good_kernel_is_measured(bench)
    worker = bench._worker
    measured = bench.measure(planted("zeros", case.device.arch), ENTRY, Launch((1, 1, 1), 2048))
    assert measured.failure is not None and "CUDA_ERROR_INVALID_VALUE" in measured.failure
    assert_a_good_kernel_is_measured(bench)
    assert bench._worker is worker


def test_times_of_one_kernel_agree(bench: Bench) -> None:
    found = [bench.measure(*good_kernel(bench.problem)).timing for _ in range(2)]
    shorter, longer = sorted(timing.micros for timing in found if timing is not None)
    noise = longer / shorter - 1
    print(f"noise {noise:.4f}, {bench.ready}")
    assert noise < 0.1


def test_clocks_are_recorded(bench: Bench) -> None:
    clocks = assert_a_good_kernel_is_measured(bench).clocks
    print(clocks)
    assert clocks is not None and clocks.sm_mhz > 100 and clocks.memory_mhz > 100
