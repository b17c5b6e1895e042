"""What both drivers share, from cuda.bindings: the device, memory, the stream, CUDA graphs and error names.

A library adds its context, its stream and how it loads and launches a kernel. Memory is cuMemAlloc's: cuda.core
allocates from pools in stream order, which torch and cuSPARSE do not follow. PyCUDA lacks graphs.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from cuda.bindings import driver as cu
from numpy.typing import NDArray

from lospmm.errors import GpuFault, LospmmError
from lospmm.gpu.protocol import Graph

_NAME = re.compile(r"\bCUDA_ERROR_\w+")

#: Bytes for a GPU's name or PCI address.
_NAME_BYTES = 256
_L2_BYTES = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE


def check(result: tuple[Any, ...]) -> Any:
    """Return the value of a call of cuda.bindings, or the tuple of its values. Raises GpuFault."""
    status, *values = result
    if status != cu.CUresult.CUDA_SUCCESS:
        raise GpuFault(f"{status.name}: {_text_of(status)}")
    return values[0] if len(values) == 1 else tuple(values)


@contextmanager
def faults_named() -> Iterator[None]:
    """Convert any exception of a library to a GpuFault with the driver's name of the error, if known."""
    try:
        yield
    except LospmmError:
        raise
    except Exception as error:  # each library has exceptions of its own, some of them private
        raise GpuFault(described(str(error)) or type(error).__name__) from error


def described(message: str) -> str:
    """Rewrite a library's message as one line that starts with the driver's name of the error.

    cuda.core's messages hold the name; PyCUDA's ("cuMemAlloc failed: out of memory") hold the driver's text for it.
    """
    line = " ".join(message.split())
    if found := _NAME.search(line):
        return line[found.start() :]
    call, _, text = line.removesuffix(" -").partition(" failed: ")  # PyCUDA adds a log, which may be empty
    name = _names_by_text().get(text.partition(" - ")[0])
    return line if name is None else f"{name}: {text} ({call})"


@cache
def _names_by_text() -> dict[str, str]:
    return {_text_of(status): status.name for status in cu.CUresult if status != cu.CUresult.CUDA_SUCCESS}


def _text_of(status: cu.CUresult) -> str:
    found, text = cu.cuGetErrorString(status)
    return str(text.decode() if found == cu.CUresult.CUDA_SUCCESS and text is not None else status.name)


def _name_in(buffer: bytes) -> str:
    """Return the text before the first NUL: cuda.bindings leaves what is behind it."""
    return buffer.split(b"\0")[0].decode()


class StreamDriver:
    """Part of a ``Driver``: all but a kernel's loading and launch. The context of its device is current."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self._device = check(cu.cuCtxGetDevice())
        self._allocated: set[int] = set()

    def device_name(self) -> str:
        """Return the name of the GPU."""
        return _name_in(check(cu.cuDeviceGetName(_NAME_BYTES, self._device)))

    def l2_bytes(self) -> int:
        """Return the size of the L2 cache."""
        return int(check(cu.cuDeviceGetAttribute(_L2_BYTES, self._device)))

    def memory_bytes(self) -> tuple[int, int]:
        """Return the free memory and all of it."""
        free, total = check(cu.cuMemGetInfo())
        return int(free), int(total)

    def bus_id(self) -> str:
        """Return the PCI address."""
        return _name_in(check(cu.cuDeviceGetPCIBusId(_NAME_BYTES, self._device)))

    def allocate(self, size: int) -> int:
        """Allocate memory on the GPU."""
        address = int(check(cu.cuMemAlloc(size)))
        self._allocated.add(address)
        return address

    def free(self, address: int) -> None:
        """Free memory."""
        self._allocated.discard(address)
        check(cu.cuMemFree(address))

    def free_all(self) -> None:
        """Free what is still allocated, without raising: after a fault nothing can be freed, nor need be."""
        for address in sorted(self._allocated):
            with suppress(GpuFault):
                self.free(address)

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

    def synchronize(self) -> None:
        """Wait for the stream."""
        check(cu.cuStreamSynchronize(self.stream))

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """Capture a graph; the mode is relaxed, as a library may load code of its own meanwhile."""
        check(cu.cuStreamBeginCapture(self.stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        try:
            enqueue()
        except BaseException:
            cu.cuStreamEndCapture(self.stream)  # its result is useless, but it ends the capture
            raise
        graph = check(cu.cuStreamEndCapture(self.stream))
        try:
            executable = check(cu.cuGraphInstantiate(graph, 0))
        finally:
            check(cu.cuGraphDestroy(graph))
        timed = cu.CUevent_flags.CU_EVENT_DEFAULT.value
        return Graph((executable, check(cu.cuEventCreate(timed)), check(cu.cuEventCreate(timed))))

    def replay_micros(self, graph: Graph) -> float:
        """Run a graph once and time it."""
        executable, start, end = graph.handle
        check(cu.cuEventRecord(start, self.stream))
        check(cu.cuGraphLaunch(executable, self.stream))
        check(cu.cuEventRecord(end, self.stream))
        check(cu.cuEventSynchronize(end))
        return 1000.0 * float(check(cu.cuEventElapsedTime(start, end)))

    def discard(self, graph: Graph) -> None:
        """Free a graph without raising: after a fault there is nothing left to free."""
        executable, start, end = graph.handle
        cu.cuGraphExecDestroy(executable)
        cu.cuEventDestroy(start)
        cu.cuEventDestroy(end)
