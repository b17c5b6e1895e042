"""The driver over PyCUDA, without ``pycuda.autoinit``, which would make a context of its own.

PyCUDA knows no CUDA graphs; they come from cuda.bindings, on PyCUDA's stream and context.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pycuda.driver as cuda
from numpy.typing import NDArray

from lospmm.gpu.bindings import GraphDriver, faults_named
from lospmm.gpu.protocol import SHARED_BYTES_UNASKED, Driver, Function
from lospmm.problem.launch import Launch

#: CU_STREAM_NON_BLOCKING, for which PyCUDA has no name.
_NON_BLOCKING = 1


class PycudaDriver(GraphDriver):
    """A row of ``DRIVERS``: the first GPU. Raises GpuFault."""

    name = "pycuda"

    @faults_named()
    def __init__(self) -> None:
        cuda.init()
        self._device = cuda.Device(0)
        self._context = self._device.retain_primary_context()
        self._context.push()
        self._stream = cuda.Stream(_NON_BLOCKING)
        self.stream = int(self._stream.handle)
        self._allocated: dict[int, Any] = {}

    @faults_named()
    def device_name(self) -> str:
        """Return the name of the GPU."""
        return str(self._device.name())

    @faults_named()
    def driver_version(self) -> tuple[int, int]:
        """Return the newest CUDA that the driver supports."""
        version = int(cuda.get_driver_version())
        return version // 1000, version % 1000 // 10

    @faults_named()
    def l2_bytes(self) -> int:
        """Return the size of the L2 cache."""
        return int(self._device.get_attribute(cuda.device_attribute.L2_CACHE_SIZE))

    @faults_named()
    def memory_bytes(self) -> tuple[int, int]:
        """Return the free memory and all of it."""
        free, total = cuda.mem_get_info()
        return int(free), int(total)

    @faults_named()
    def bus_id(self) -> str:
        """Return the PCI address."""
        return str(self._device.pci_bus_id())

    @faults_named()
    def load(self, image: bytes, entry: str) -> Function:
        """Load a kernel of a cubin."""
        module = cuda.module_from_buffer(image)
        function = module.get_function(entry)
        return Function(function, module, int(function.get_attribute(cuda.function_attribute.NUM_REGS)))

    @faults_named()
    def allocate(self, size: int) -> int:
        """Allocate memory on the GPU."""
        allocation = cuda.mem_alloc(size)
        address = int(allocation)
        self._allocated[address] = allocation  # PyCUDA frees what nobody holds
        return address

    @faults_named()
    def free(self, address: int) -> None:
        """Free memory."""
        self._allocated.pop(address).free()

    @faults_named()
    def upload(self, address: int, array: NDArray[Any]) -> None:
        """Copy an array to the GPU."""
        assert array.flags.c_contiguous, "only a contiguous array is copied"
        cuda.memcpy_htod_async(address, array, self._stream)
        self._stream.synchronize()

    @faults_named()
    def download(self, array: NDArray[Any], address: int) -> None:
        """Copy from the GPU into an array."""
        assert array.flags.c_contiguous, "only a contiguous array is copied"
        cuda.memcpy_dtoh_async(array, address, self._stream)
        self._stream.synchronize()

    @faults_named()
    def fill(self, address: int, word: int, count: int) -> None:
        """Set words of 32 bits."""
        cuda.memset_d32_async(address, word, count, self._stream)

    @faults_named()
    def copy(self, to: int, address: int, size: int) -> None:
        """Copy memory on the GPU."""
        cuda.memcpy_dtod_async(to, address, size, self._stream)

    @faults_named()
    def launch(self, function: Function, shape: Launch, arguments: Sequence[np.generic]) -> None:
        """Launch a kernel on the stream."""
        kernel = function.handle
        if shape.shared_bytes > SHARED_BYTES_UNASKED:
            kernel.set_attribute(cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shape.shared_bytes)
        kernel(
            *arguments,
            grid=tuple(shape.grid),
            block=(shape.block, 1, 1),
            shared=shape.shared_bytes,
            stream=self._stream,
        )

    @faults_named()
    def synchronize(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()

    @faults_named()
    def close(self) -> None:
        """Free what was allocated, the stream and the context."""
        for address in list(self._allocated):
            self.free(address)
        del self._stream  # while its context is still current
        self._context.pop()


def open_gpu() -> Driver:
    """Open the first GPU. Raises GpuFault."""
    return PycudaDriver()
