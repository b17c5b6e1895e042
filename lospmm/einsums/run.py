"""Execution of an expression's kernel: on the CPU, through g++, or on this machine's GPU."""

from collections.abc import Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from lospmm.cpu.block import run_blocks
from lospmm.families.packed import PackedKernel
from lospmm.gpu.driver import open_driver
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.template import emission_of


def run_on_cpu(
    kernel: PackedKernel, inputs: Sequence[NDArray[np.float32]], shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """Return the output from the CPU. Raises VerificationFailed if the kernel faults, ToolchainFault."""
    blocks = np.arange(kernel.launch.grid[0])
    first, *others = inputs or (np.zeros(1, np.float32),)
    return run_blocks(kernel, blocks, first, np.full(shape, np.nan, np.float32), *others)


def compile_for(kernel: PackedKernel, arch: str) -> bytes:
    """Return the cubin for ``arch``. Raises Unsupported and ToolchainFault."""
    store = Store(settings().cache_dir)
    return compile_kernel(emission_of(kernel), arch=arch, registers=kernel.registers, store=store, workers=1).cubin


def run_on_gpu(
    kernel: PackedKernel, cubin: bytes, inputs: Sequence[NDArray[np.float32]], shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """Return the output from this machine's GPU. Raises GpuFault."""
    dtype = kernel.dtype
    first, *others = inputs or (np.zeros(1, np.float32),)
    stored = [dtype.to_storage(array) for array in (first, np.full(shape, np.nan, np.float32), *others)]
    with closing(open_driver(settings().driver)) as driver:
        function = driver.load(cubin, kernel.entry)
        addresses = [driver.allocate(max(4, array.nbytes)) for array in stored]
        for address, array in zip(addresses, stored, strict=True):
            if array.nbytes:
                driver.upload(address, array)
        driver.launch(function, kernel.launch, tuple(np.uint64(address) for address in addresses))
        driver.download(stored[1], addresses[1])
    return dtype.from_storage(stored[1])
