"""Both drivers on a real GPU: memory, launches, graphs, the gate against verify.py, torch beside them."""

from collections.abc import Callable

import numpy as np
import pytest

from lospmm.codegen.emission import Emission
from lospmm.cpu import reference
from lospmm.errors import GpuFault
from lospmm.gpu import bench as measure
from lospmm.gpu import gate, operands
from lospmm.gpu.bench import Bench
from lospmm.gpu.clocks import read_clocks
from lospmm.gpu.detect import detect_device
from lospmm.gpu.protocol import Driver
from lospmm.gpu.timing import time_rotating
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain import elf
from lospmm.toolchain.compile import compile_kernel
from tests.on_gpu.problems import good_kernel, problem

pytestmark = pytest.mark.gpu


def test_it_says_what_gpu_it_has(driver: Driver) -> None:
    assert "NVIDIA" in driver.device_name() or "GeForce" in driver.device_name()
    assert driver.device_name().isprintable() and driver.bus_id().isprintable()
    assert 1 << 20 <= driver.l2_bytes() <= 1 << 30
    free, total = driver.memory_bytes()
    assert 0 < free <= total
    assert driver.stream != 0
    assert read_clocks(driver.bus_id()) is not None
    print(driver.device_name(), driver.l2_bytes(), driver.memory_bytes())


def test_memory_is_what_was_put_there(driver: Driver) -> None:
    sent = np.arange(1000, dtype=np.float32)
    address = driver.allocate(sent.nbytes)
    assert address % 256 == 0
    driver.upload(address, sent)
    driver.fill(address + 40, 0xFFFFFFFF, 3)
    received = np.empty_like(sent)
    driver.download(received, address)
    assert np.isnan(received[10:13]).all()
    assert np.array_equal(np.delete(received, slice(10, 13)), np.delete(sent, slice(10, 13)))
    driver.copy(address, address + 2000, 400)
    driver.download(received, address)
    assert np.array_equal(received[:100], sent[500:600]) and np.array_equal(received[100:], sent[100:])
    driver.free(address)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (65, 96, 1003), (256, 576, 4096), (6, 40, 5_000_000)])
def test_the_gate_agrees_with_verify(driver: Driver, m: int, k: int, n: int) -> None:
    case = problem(m, k, n)
    bench = gate.prepare(measure._prepare(case, seed=1), driver)
    place = bench.operands
    cubin, entry, shape = good_kernel(case)
    function = driver.load(cubin, entry)
    assert function.registers == elf.kernel_usage(cubin, entry).registers

    def enqueue(copy: int) -> None:
        driver.launch(function, shape, (np.uint64(place.b[copy]), np.uint64(place.c[copy])))

    verdict = gate.run_and_check(bench, enqueue, copy=0)
    assert verdict.failure is None
    last = place.copies - 1
    assert gate.run_and_check(bench, enqueue, copy=last).failure is None
    assert gate.count_different(bench, place.c[0], place.c[last]) == 0
    b, c = np.empty((k, n), dtype=np.float32), np.empty((m, n), dtype=np.float32)
    driver.download(b, place.b[0])
    driver.download(c, place.c[0])
    columns = np.unique(np.linspace(0, n - 1, 500).astype(np.int64))
    exact = reference.compare(case, columns, b[:, columns], c[:, columns])
    assert exact <= verdict.max_relative_error * (1 + 1e-6)
    if n <= 500:
        assert verdict.max_relative_error == pytest.approx(exact, rel=1e-6)
    driver.fill(place.c[last] + 4 * (m * n - 1), 0x3F800000, 1)
    driver.synchronize()
    different = gate.count_different(bench, place.c[0], place.c[last])
    assert different == (last != 0)


def test_a_graph_repeats_what_was_captured(driver: Driver) -> None:
    launch, c = launch_of(driver, problem(65, 96, 1003))
    found = np.zeros((65, 1003), dtype=np.float32)
    launch()
    driver.download(found, c)
    assert np.isfinite(found).all() and found.any()
    driver.fill(c, 0, found.size)
    graph = driver.capture(launch)
    again = np.ones_like(found)
    driver.download(again, c)
    assert not again.any()  # it was not run
    assert driver.replay_micros(graph) > 0
    driver.download(again, c)
    assert np.array_equal(again, found)
    driver.discard(graph)


def launch_of(driver: Driver, case: Problem) -> tuple[Callable[..., None], int]:
    """A kernel's launch, with as much shared memory as is asked for, and where its C is."""
    cubin, entry, shape = good_kernel(case)
    task = measure._prepare(case, seed=1)
    place = operands.allocate(driver, task)
    operands.fill(driver, place, task)
    function, arguments = driver.load(cubin, entry), (np.uint64(place.b[0]), np.uint64(place.c[0]))

    def launch(shared_bytes: int = shape.shared_bytes) -> None:
        driver.launch(function, Launch(shape.grid, shape.block, shared_bytes), arguments)

    return launch, place.c[0]


def test_a_fault_while_capturing_leaves_the_stream_usable(driver: Driver) -> None:
    def fails() -> None:
        driver.fill(driver_address, 1, 1)
        raise GpuFault("planted")

    driver_address = driver.allocate(4)
    with pytest.raises(GpuFault, match="planted"):
        driver.capture(fails)
    driver.synchronize()
    driver.discard(driver.capture(lambda: driver.fill(driver_address, 2, 1)))


def test_time_grows_with_the_work(driver: Driver) -> None:
    size = 2 << 30  # far beyond any L2 cache
    address = driver.allocate(size)
    times = [
        time_rotating(driver, lambda _, words=words: driver.fill(address, 0, words), copies=1).micros
        for words in (size // 16, size // 4)
    ]
    assert 2.5 < times[1] / times[0] < 6
    assert size / times[1] / 1e6 < 20  # terabytes a second


def test_an_image_that_is_none_has_a_named_error(driver: Driver) -> None:
    with pytest.raises(GpuFault, match="CUDA_ERROR_"):
        driver.load(b"\0" * 4096, "kernel")
    driver.synchronize()  # and costs nothing


def test_large_shared_memory_is_asked_for(driver: Driver) -> None:
    launch, _ = launch_of(driver, problem(65, 96, 1003))
    launch(60 << 10)
    driver.synchronize()
    with pytest.raises(GpuFault, match="CUDA_ERROR_INVALID_VALUE"):
        launch(1 << 20)
    driver.synchronize()


def test_code_is_unloaded_with_its_last_reference(driver: Driver) -> None:
    size = 1 << 30
    text = f'__device__ char held[{size}];\nextern "C" __global__ void keep() {{ held[threadIdx.x] = 1; }}\n'
    emission = Emission(language="cuda", entry="keep", source=text, units=(text,))
    arch, store = detect_device().arch, Store(settings().cache_dir)
    cubin = compile_kernel(emission, arch=arch, registers=32, store=store, workers=1).cubin
    before = driver.memory_bytes()[0]
    used = []
    for _ in range(5):
        function = driver.load(cubin, "keep")
        driver.launch(function, Launch((1, 1, 1), 32, 0), ())
        driver.synchronize()
        used.append(before - driver.memory_bytes()[0])
        del function
    assert size <= used[0] and used[-1] < 2.5 * size


def test_torch_shares_the_context(driver: Driver) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(1024, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    driver.fill(tensor.data_ptr(), 9, 1024)
    driver.synchronize()
    assert int(tensor.sum()) == 9 * 1024
    with torch.cuda.stream(torch.cuda.ExternalStream(driver.stream)):
        tensor += 1
    received = np.empty(1024, dtype=np.int32)
    driver.download(received, tensor.data_ptr())
    assert (received == 10).all()


def measured_micros(case: Problem, cache: str) -> float:
    with Bench(case, cache="warm" if cache == "warm" else "cold") as bench:
        measured = bench.measure(*good_kernel(case))
        print(cache, measured, bench.ready)
        assert measured.timing is not None, measured.failure
        assert measured.timing.spread < 0.2
        return measured.timing.micros


def test_a_warm_cache_is_not_slower() -> None:
    case = problem(64, 1024, 8192)  # 34 MB of B: within the L2 cache of the larger GPUs
    assert measured_micros(case, "warm") < 1.05 * measured_micros(case, "cold")
