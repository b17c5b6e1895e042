"""The driver over cuda.core, which has device, stream, code and launches; memory is cuMemAlloc's.

cuda.core allocates from pools in stream order, which torch and cuSPARSE do not follow; hence cuda.bindings for
memory.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from cuda.bindings import driver as cu
from cuda.core import Device, LaunchConfig, ObjectCode, launch
from numpy.typing import NDArray

from lospmm.errors import GpuFault
from lospmm.gpu.bindings import GraphDriver, check, faults_named
from lospmm.gpu.protocol import SHARED_BYTES_UNASKED, Driver, Function
from lospmm.problem.launch import Launch

_REGISTERS = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
_SHARED_BYTES = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CudaCoreDriver(GraphDriver):
    """A row of ``DRIVERS``: the first GPU. Raises GpuFault."""

    name = "cuda-core"

    @faults_named()
    def __init__(self) -> None:
        check(cu.cuInit(0))  # first, for a clear name of the error where there is no GPU
        self._device = Device(0)
        self._device.set_current()  # retains the primary context
        self._stream = self._device.create_stream()  # non-blocking unless asked otherwise
        self.stream = int(self._stream.handle)
        self._allocated: set[int] = set()

    @faults_named()
    def device_name(self) -> str:
        """Return the name of the GPU."""
        return str(self._device.name)

    def driver_version(self) -> tuple[int, int]:
        """Return the newest CUDA that the driver supports."""
        version = check(cu.cuDriverGetVersion())
        return version // 1000, version % 1000 // 10

    @faults_named()
    def l2_bytes(self) -> int:
        """Return the size of the L2 cache."""
        return int(self._device.properties.l2_cache_size)

    def memory_bytes(self) -> tuple[int, int]:
        """Return the free memory and all of it."""
        free, total = check(cu.cuMemGetInfo())
        return int(free), int(total)

    @faults_named()
    def bus_id(self) -> str:
        """Return the PCI address."""
        return str(self._device.pci_bus_id)

    @faults_named()
    def load(self, image: bytes, entry: str) -> Function:
        """Load a kernel of a cubin."""
        module = ObjectCode.from_cubin(image)
        kernel = module.get_kernel(entry)  # this is what loads the image
        return Function(kernel, module, int(check(cu.cuKernelGetAttribute(_REGISTERS, kernel.handle, 0))))

    def allocate(self, size: int) -> int:
        """Allocate memory on the GPU."""
        address = int(check(cu.cuMemAlloc(size)))
        self._allocated.add(address)
        return address

    def free(self, address: int) -> None:
        """Free memory."""
        self._allocated.discard(address)
        check(cu.cuMemFree(address))

    def upload(self, address: int, array: NDArray[Any]) -> None:
        """Copy an array to the GPU."""
        assert array.flags.c_contiguous, "only a contiguous array is copied"
        check(cu.cuMemcpyHtoDAsync(address, array.ctypes.data, array.nbytes, self.stream))
        self.synchronize()

    def download(self, array: NDArray[Any], address: int) -> None:
        """Copy from the GPU into an array."""
        assert array.flags.c_contiguous, "only a contiguous array is copied"
        check(cu.cuMemcpyDtoHAsync(array.ctypes.data, address, array.nbytes, self.stream))
        self.synchronize()

    def fill(self, address: int, word: int, count: int) -> None:
        """Set words of 32 bits."""
        check(cu.cuMemsetD32Async(address, word, count, self.stream))

    def copy(self, to: int, address: int, size: int) -> None:
        """Copy memory on the GPU."""
        check(cu.cuMemcpyDtoDAsync(to, address, size, self.stream))

    @faults_named()
    def launch(self, function: Function, shape: Launch, arguments: Sequence[np.generic]) -> None:
        """Launch a kernel on the stream."""
        if shape.shared_bytes > SHARED_BYTES_UNASKED:
            check(cu.cuKernelSetAttribute(_SHARED_BYTES, shape.shared_bytes, function.handle.handle, 0))
        config = LaunchConfig(grid=tuple(shape.grid), block=shape.block, shmem_size=shape.shared_bytes)
        launch(self._stream, config, function.handle, *arguments)

    def synchronize(self) -> None:
        """Wait for the stream."""
        check(cu.cuStreamSynchronize(self.stream))

    def close(self) -> None:
        """Free what was allocated, the stream and the context."""
        for address in sorted(self._allocated):
            with suppress(GpuFault):  # after a fault nothing can be freed, nor need be
                self.free(address)
        self._stream.close()


def open_gpu() -> Driver:
    """Open the first GPU. Raises GpuFault."""
    return CudaCoreDriver()
