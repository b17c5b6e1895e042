"""Kernels and libraries timed as a layer of a network finds the GPU: behind what empties the L2 cache and writes B."""

from collections.abc import Iterator

import numpy as np
import pytest

from lospmm.gpu import bench as measure
from lospmm.gpu import gate, network, operands, worker
from lospmm.gpu.bench import Bench
from lospmm.gpu.libraries import BaselineTime
from lospmm.gpu.libraries.work import COMMAND, BaselineTask
from lospmm.gpu.messages import Measure
from lospmm.gpu.protocol import Driver
from lospmm.gpu.timing import BRIEF, FULL
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from tests.on_gpu.bad_kernels import ENTRY, planted
from tests.on_gpu.problems import good_kernel, problem

pytestmark = pytest.mark.gpu

SIZES = [(1, 1, 1), (65, 96, 1003), (256, 576, 4096), (6, 40, 5_000_000)]


@pytest.fixture
def with_pycuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("pycuda", reason="PyCUDA is not installed")
    monkeypatch.setenv("LOSPMM_DRIVER", "pycuda")
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.mark.parametrize("size", SIZES)
def test_every_kernel_has_a_time_left(size: tuple[int, int, int]) -> None:
    case = problem(*size)
    with Bench(case, cache="network") as bench:
        for effort in (BRIEF, FULL):
            measured = bench.measure(*good_kernel(case), effort=effort)
            print(size, measured)
            assert measured.failure is None and measured.timing is not None
            assert measured.timing.micros > 0 and measured.timing.replays == effort.replays
            assert measured.max_relative_error is not None and measured.max_relative_error < 1e-6


@pytest.mark.usefixtures("with_pycuda")
def test_through_the_other_driver_too() -> None:
    test_every_kernel_has_a_time_left(SIZES[1])


def test_a_wrong_kernel_fails_there_and_the_next_is_timed() -> None:
    case = problem(65, 96, 1003)
    launch = good_kernel(case)[2]
    with Bench(case, cache="network") as bench:
        for kind in ("zeros", "does nothing", "illegal address"):
            wrong = bench.measure(planted(kind, case.device.arch), ENTRY, launch)
            assert wrong.timing is None and wrong.failure is not None
            assert bench.measure(*good_kernel(case)).failure is None


def downloaded(driver: Driver, case: Problem, address: int) -> np.ndarray:
    b = np.empty((case.matrix.k, case.n), dtype=np.float32)
    driver.download(b, address)
    return b


@pytest.mark.parametrize("size", SIZES[1:3])
def test_b_is_what_it_was_and_the_cache_is_emptied(driver: Driver, size: tuple[int, int, int]) -> None:
    case = problem(*size)
    bench = gate.prepare(measure._prepare(case, 1, "network"), driver)
    place = bench.operands
    b = downloaded(driver, case, place.b[0])
    assert place.flush_bytes >= operands.FLUSHED * driver.l2_bytes() > driver.l2_bytes()
    assert np.array_equal(downloaded(driver, case, place.source), b)
    driver.fill(place.b[-1], 0, case.matrix.k * case.n)
    start = place.source + operands.padded_b_bytes(place)
    driver.fill(start, 0xABCD, place.flush_bytes // 4)
    network.layers_before(bench)(place.copies - 1)
    written = np.empty(place.flush_bytes // 4, dtype=np.uint32)
    driver.download(written, start + place.flush_bytes)
    assert (written == 0xABCD).all()
    cubin, entry, launch = good_kernel(case)
    task = Measure(cubin, entry, launch, "network")
    assert worker.measure(bench, task).failure is None
    for address in (*place.b, place.source):
        assert np.array_equal(downloaded(driver, case, address), b)


@pytest.mark.parametrize("library", ["cusparse", "cublas_fp32", "cublas_tf32"])
def test_libraries_are_timed_in_the_same_state(library: str) -> None:
    with Bench(problem(256, 576, 4096), cache="network") as bench:
        found = bench.request(COMMAND, BaselineTask(library, "network"))
    assert isinstance(found, BaselineTime)
    if found.failure is not None and "is not installed" in found.failure:
        pytest.skip(found.failure)
    print(found)
    assert found.failure is None and found.micros is not None and found.micros > 0
