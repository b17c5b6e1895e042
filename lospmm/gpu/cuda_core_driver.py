"""The driver over cuda.core, which has device, stream, code and launches."""

import weakref
from collections.abc import Sequence

import numpy as np
from cuda.bindings import driver as cu
from cuda.core import Device, Kernel, LaunchConfig, launch

from lospmm.gpu.bindings import StreamDriver, check, faults_named
from lospmm.gpu.protocol import SHARED_BYTES_UNASKED, Driver, Function
from lospmm.problem.launch import Launch

_REGISTERS = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
_SHARED_BYTES = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _Code:
    """A loaded cubin, unloaded with its last reference: cuda.core leaves what it loads until the process ends."""

    def __init__(self, image: bytes) -> None:
        self.handle = check(cu.cuLibraryLoadData(image, None, None, 0, None, None, 0))
        weakref.finalize(self, cu.cuLibraryUnload, self.handle).atexit = False


class CudaCoreDriver(StreamDriver):
    """A row of ``DRIVERS``: the first GPU. Raises GpuFault."""

    @faults_named()
    def __init__(self) -> None:
        check(cu.cuInit(0))  # first, for a clear name of the error where there is no GPU
        device = Device(0)
        device.set_current()  # retains the primary context
        self._stream = device.create_stream()  # non-blocking unless asked otherwise
        super().__init__(int(self._stream.handle))

    @faults_named()
    def load(self, image: bytes, entry: str) -> Function:
        """Load a kernel of a cubin."""
        code = _Code(image)
        kernel = check(cu.cuLibraryGetKernel(code.handle, entry.encode()))
        registers = int(check(cu.cuKernelGetAttribute(_REGISTERS, kernel, 0)))
        return Function(Kernel.from_handle(int(kernel)), code, registers)

    @faults_named()
    def launch(self, function: Function, shape: Launch, arguments: Sequence[np.generic]) -> None:
        """Launch a kernel on the stream."""
        if shape.shared_bytes > SHARED_BYTES_UNASKED:
            check(cu.cuKernelSetAttribute(_SHARED_BYTES, shape.shared_bytes, function.handle.handle, 0))
        config = LaunchConfig(grid=tuple(shape.grid), block=shape.block, shmem_size=shape.shared_bytes)
        launch(self._stream, config, function.handle, *arguments)

    def close(self) -> None:
        """Free what was allocated and the stream."""
        self.free_all()
        self._stream.close()


def open_gpu() -> Driver:
    """Open the first GPU. Raises GpuFault."""
    return CudaCoreDriver()
