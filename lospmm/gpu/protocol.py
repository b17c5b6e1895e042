"""The interface of a CUDA driver binding; ``gpu.driver`` opens one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.launch import Launch

#: The alignment of what ``allocate`` returns (CUDA C++ Programming Guide, "Device Memory Accesses").
ALIGNMENT_BYTES = 256

#: Dynamic shared memory that a kernel may have without asking (CUDA C++ Programming Guide, "Shared Memory").
SHARED_BYTES_UNASKED = 48 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A kernel, loaded until its last reference is gone; ``handle`` and ``module`` are the library's."""

    handle: Any
    module: Any
    registers: int  # per thread, as the driver reads them from the machine code


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Captured work, ready to be launched repeatedly until ``discard``; ``handle`` is the driver's."""

    handle: Any


class Driver(Protocol):
    """One GPU, its primary context, and one non-blocking stream on which everything runs in order."""

    @property
    def stream(self) -> int:
        """The stream, a CUstream, as an integer: what cuSPARSE, cuBLAS and torch take."""

    def device_name(self) -> str:
        """Return the name of the GPU, as in "NVIDIA H200"."""

    def l2_bytes(self) -> int:
        """Return the size of the L2 cache."""

    def memory_bytes(self) -> tuple[int, int]:
        """Return the free memory, which all processes share, and all of it."""

    def bus_id(self) -> str:
        """Return the GPU's PCI address, as in "0000:1B:00.0": the name that NVML knows it by too."""

    def load(self, image: bytes, entry: str) -> Function:
        """Load the kernel ``entry`` of a cubin."""

    def allocate(self, size: int) -> int:
        """Allocate ``size`` bytes at a multiple of ``ALIGNMENT_BYTES``, until ``free`` or ``close``."""

    def free(self, address: int) -> None:
        """Free what ``allocate`` returned."""

    def upload(self, address: int, array: NDArray[Any]) -> None:
        """Copy a contiguous array to the GPU. Returns when it has been read."""

    def download(self, array: NDArray[Any], address: int) -> None:
        """Fill a contiguous array from the GPU, once all work on the stream is done."""

    def fill(self, address: int, word: int, count: int) -> None:
        """Set ``count`` 32-bit words, on the stream."""

    def copy(self, to: int, address: int, size: int) -> None:
        """Copy ``size`` bytes from one place on the GPU to another, on the stream."""

    def launch(self, function: Function, shape: Launch, arguments: Sequence[np.generic]) -> None:
        """Start a kernel on the stream.

        Each argument is passed with its own size: an address is ``np.uint64``.
        """

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """Capture what ``enqueue`` puts on the stream, without running it.

        It has run once before, and allocates nothing.
        """

    def replay_micros(self, graph: Graph) -> float:
        """Run a graph once; return the microseconds between two events before and after it."""

    def discard(self, graph: Graph) -> None:
        """Free a graph."""

    def synchronize(self) -> None:
        """Wait for the stream. If a kernel has failed, this raises."""

    def close(self) -> None:
        """Free what was allocated, and let go of the stream and the context."""
