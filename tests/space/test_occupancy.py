import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from cuda.pathfinder import find_nvidia_header_directory
from hypothesis import given
from hypothesis import strategies as st

from lospmm.problem.device import DEVICES, DeviceSpec
from lospmm.space.occupancy import (
    active_blocks,
    allocated_registers,
    resident_blocks,
    shared_bytes_for,
)

H200, A100, V100, TURING, ADA = (DEVICES[name] for name in ("h200", "a100", "v100", "rtx2080ti", "rtx4090"))

#: Block counts that no request on a V100 gives: its 384 units of 256 bytes an SM do not divide so.
V100_SKIPS = {23: 24, 26: 27, 28: 29, 30: 32, 31: 32}

#: Reads a device and then cases: threads, registers a thread, shared bytes. Prints the resident blocks of each.
CALCULATOR = """
#include <cuda_occupancy.h>
#include <cstdio>
int main() {
    cudaOccDeviceProp device;
    std::scanf("%d%d%d%d%d%d%d%zu%zu%zu", &device.computeMajor, &device.computeMinor, &device.warpSize,
        &device.maxThreadsPerBlock, &device.maxThreadsPerMultiprocessor, &device.regsPerBlock,
        &device.regsPerMultiprocessor, &device.sharedMemPerMultiprocessor, &device.sharedMemPerBlockOptin,
        &device.reservedSharedMemPerBlock);
    device.sharedMemPerBlock = 48 * 1024;
    device.numSms = 1;
    cudaOccDeviceState state;
    state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    int threads, registers;
    size_t shared_bytes;
    while (std::scanf("%d%d%zu", &threads, &registers, &shared_bytes) == 3) {
        cudaOccFuncAttributes kernel;
        kernel.maxThreadsPerBlock = device.maxThreadsPerBlock;
        kernel.numRegs = registers;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        kernel.maxDynamicSharedSizeBytes = device.sharedMemPerBlockOptin;
        cudaOccResult result;
        if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared_bytes))
            return 1;
        std::printf("%d\\n", result.activeBlocksPerMultiprocessor);
    }
}
"""

Calculator = Callable[[DeviceSpec, list[tuple[int, int, int]]], list[int]]

devices = st.sampled_from(sorted(DEVICES.values(), key=lambda device: device.name))


def by_shared_memory(shared_bytes: int, device: DeviceSpec) -> int:
    """Blocks of an SM with no limit but its shared memory."""
    roomy = replace(device, blocks_per_sm=1 << 20, threads_per_sm=1 << 30, registers_per_sm=1 << 30)
    return resident_blocks(roomy, threads=1, registers_per_thread=1, shared_bytes=shared_bytes)


@pytest.fixture(scope="session")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> Calculator:
    """NVIDIA's occupancy calculator, compiled for the host."""
    include = find_nvidia_header_directory("cudart")
    if include is None or not (Path(include) / "cuda_occupancy.h").exists() or shutil.which("g++") is None:
        pytest.skip("needs g++ and cuda_occupancy.h")
    program = tmp_path_factory.mktemp("calculator") / "calculator"
    command = ["g++", "-w", "-x", "c++", "-I", include, "-o", str(program), "-"]
    subprocess.run(command, input=CALCULATOR, text=True, check=True)

    def ask(device: DeviceSpec, cases: list[tuple[int, int, int]]) -> list[int]:
        major, minor = divmod(int(device.arch.removeprefix("sm_")), 10)
        figures = (
            *(major, minor, device.warp_size, device.threads_per_block, device.threads_per_sm),
            *(device.registers_per_block, device.registers_per_sm, device.shared_bytes_per_sm),
            *(device.shared_bytes_per_block, device.reserved_shared_bytes),
        )
        lines = "\n".join(" ".join(map(str, numbers)) for numbers in [figures, *cases])
        answer = subprocess.run([program], input=lines, text=True, check=True, capture_output=True).stdout
        return [int(line) for line in answer.split()]

    return ask


@pytest.mark.parametrize(("used", "allocated"), [(1, 8), (8, 8), (9, 16), (168, 168), (169, 176), (255, 256)])
def test_registers_are_allocated_in_units_of_eight(used: int, allocated: int):
    assert allocated_registers(used, H200) == allocated


@pytest.mark.parametrize(
    ("problem_blocks", "registers_per_block", "device", "expected"),
    [
        (1, 256 * 32, H200, 1),  # the grid is smaller than the GPU
        (132, 256 * 32, H200, 1),
        (133, 256 * 32, H200, 2),  # one more block than SMs
        (10_000, 256 * 64, H200, 4),  # 65536 / 16384
        (10_000, 256 * 72, H200, 3),  # 65536 / 18432 = 3.6
        (10_000, 512 * 128, H200, 1),  # all registers of an SM
        (10_000, 512 * 136, H200, 0),  # does not fit
        (400, 128 * 40, V100, 5),  # ceil(400 / 80), where registers would allow 12
        (400, 128 * 40, TURING, 6),  # ceil(400 / 68)
    ],
)
def test_equation_5(problem_blocks: int, registers_per_block: int, device: DeviceSpec, expected: int):
    assert active_blocks(problem_blocks, registers_per_block, device) == expected


@pytest.mark.parametrize(
    ("blocks", "device", "expected"),
    [
        (1, H200, 227 * 1024),  # the most a block may ask for
        (2, H200, 113 * 1024),
        (3, H200, 75 * 1024),
        (5, H200, 45568),  # 233472 / 5 = 46694.4, 364 units of 128, less 1024
        (32, H200, 6272),  # 57 units of 128, less 1024
        (1, V100, 96 * 1024),
        (7, V100, 13824),  # 98304 / 7 = 14043.4, 54 units of 256, nothing reserved
        (1, TURING, 64 * 1024),
        (16, TURING, 4096),
        (228, H200, 0),  # the reserved bytes take everything
        (5000, H200, 0),
    ],
)
def test_equation_6(blocks: int, device: DeviceSpec, expected: int):
    assert shared_bytes_for(blocks, device) == expected


def test_equation_6_gives_exactly_that_many_blocks():
    for device in DEVICES.values():
        skips = V100_SKIPS if device is V100 else {}
        for blocks in range(1, device.blocks_per_sm + 1):
            assert by_shared_memory(shared_bytes_for(blocks, device), device) == skips.get(blocks, blocks), device.name


@given(device=devices, blocks=st.integers(1, 64))
def test_no_larger_request_leaves_room_for_so_many_blocks(device: DeviceSpec, blocks: int):
    shared_bytes = shared_bytes_for(blocks, device)
    assert by_shared_memory(shared_bytes, device) >= blocks
    assert by_shared_memory(shared_bytes + 1, device) < blocks


def test_a_cap_below_half_an_sm_lets_a_second_block_in():
    capped = replace(H200, shared_bytes_per_block=48 * 1024)
    assert shared_bytes_for(1, capped) == 48 * 1024
    assert by_shared_memory(shared_bytes_for(1, capped), capped) == 4  # 228 / (48 + 1)
    assert by_shared_memory(shared_bytes_for(5, capped), capped) == 5


@pytest.mark.parametrize(
    ("device", "threads", "registers_per_thread", "shared_bytes", "expected"),
    [
        (H200, 256, 32, 0, 8),  # 2048 threads and 65536 registers alike
        (H200, 256, 33, 0, 6),  # 40 allocated: 12 warps in each of 4 sub-partitions, 48 warps
        (H200, 256, 80, 0, 3),  # 2560 a warp: 6 in each sub-partition, 24 warps, where 65536 would hold 25
        (H200, 32, 80, 0, 24),
        (H200, 512, 128, 0, 1),
        (H200, 512, 129, 0, 0),  # 136 * 512 registers are more than a block may have
        (H200, 288, 224, 0, 0),  # 9 warps are checked as 12: 86016 registers
        (H200, 256, 255, 0, 1),
        (H200, 256, 256, 0, 0),  # no thread can address so many
        (H200, 1024, 32, 0, 2),
        (H200, 1025, 32, 0, 0),
        (H200, 33, 8, 0, 32),  # 2 warps a block: 32 blocks by threads and by blocks
        (H200, 32, 8, 0, 32),  # blocks_per_sm
        (H200, 32, 8, 6272, 32),
        (H200, 32, 8, 6273, 31),  # 58 units of 128
        (H200, 32, 8, 113 * 1024, 2),
        (H200, 32, 8, 113 * 1024 + 1, 1),
        (H200, 32, 8, 227 * 1024, 1),
        (H200, 32, 8, 227 * 1024 + 1, 0),
        (A100, 128, 16, 40 * 1024, 4),  # 164 / (40 + 1)
        (V100, 128, 16, 48 * 1024, 2),
        (V100, 128, 16, 0, 16),
        (TURING, 256, 32, 0, 4),  # 1024 threads
        (TURING, 32, 8, 0, 16),
        (ADA, 512, 32, 0, 3),  # 1536 threads
        (ADA, 32, 8, 0, 24),
    ],
)
def test_resident_blocks(device: DeviceSpec, threads: int, registers_per_thread: int, shared_bytes: int, expected: int):
    found = resident_blocks(
        device, threads=threads, registers_per_thread=registers_per_thread, shared_bytes=shared_bytes
    )
    assert found == expected


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES.keys())
def test_nvidias_calculator_agrees(calculator: Calculator, device: DeviceSpec):
    threads = [1, 32, 33, 96, 128, 160, 256, 288, 512, 768, 1000, 1024]
    requests = [0, 1, 4096, 6272, 6273, 48 * 1024, 49 * 1024, device.shared_bytes_per_block]
    cases = list(product(threads, range(1, 256, 3), requests))
    cases += [(32, 8, shared_bytes_for(blocks, device)) for blocks in range(1, device.blocks_per_sm + 1)]
    block, registers, shared = np.array(cases).T
    ours = resident_blocks(device, threads=block, registers_per_thread=registers, shared_bytes=shared)
    assert ours.tolist() == calculator(device, cases)


@given(
    device=devices,
    threads=st.integers(1, 1024),
    registers_per_thread=st.integers(1, 255),
    shared_bytes=st.integers(0, 228 << 10),
)
def test_more_of_anything_never_admits_more_blocks(
    device: DeviceSpec, threads: int, registers_per_thread: int, shared_bytes: int
):
    def resident(threads: int, registers_per_thread: int, shared_bytes: int) -> int:
        return resident_blocks(
            device, threads=threads, registers_per_thread=registers_per_thread, shared_bytes=shared_bytes
        )

    blocks = resident(threads, registers_per_thread, shared_bytes)
    assert resident(threads + 1, registers_per_thread, shared_bytes) <= blocks
    assert resident(threads, registers_per_thread + 1, shared_bytes) <= blocks
    assert resident(threads, registers_per_thread, shared_bytes + 1) <= blocks
