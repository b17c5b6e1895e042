"""The driver over PyCUDA, without ``pycuda.autoinit``, which would make a context of its own."""

from collections.abc import Sequence

import numpy as np
import pycuda.driver as cuda

from lospmm.gpu.bindings import StreamDriver, faults_named
from lospmm.gpu.protocol import SHARED_BYTES_UNASKED, Driver, Function
from lospmm.problem.launch import Launch

#: CU_STREAM_NON_BLOCKING, for which PyCUDA has no name.
_NON_BLOCKING = 1


class PycudaDriver(StreamDriver):
    """A row of ``DRIVERS``: the first GPU. Raises GpuFault."""

    @faults_named()
    def __init__(self) -> None:
        cuda.init()
        self._context = cuda.Device(0).retain_primary_context()
        self._context.push()
        self._stream = cuda.Stream(_NON_BLOCKING)
        super().__init__(int(self._stream.handle))

    @faults_named()
    def load(self, image: bytes, entry: str) -> Function:
        """Load a kernel of a cubin."""
        module = cuda.module_from_buffer(image)
        function = module.get_function(entry)
        return Function(function, module, int(function.get_attribute(cuda.function_attribute.NUM_REGS)))

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
    def close(self) -> None:
        """Free what was allocated, the stream and the context."""
        self.free_all()
        del self._stream  # while its context is still current
        self._context.pop()


def open_gpu() -> Driver:
    """Open the first GPU. Raises GpuFault."""
    return PycudaDriver()
