"""Messages between a ``Bench`` and its worker: immutable values, pickled one after the other.

The worker imports this, so it depends only on NumPy and the small files beside it.
"""

import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, BinaryIO, Literal, get_args

from lospmm.errors import GpuFault, system_errors
from lospmm.gpu.timing import FULL, Effort, Timing
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.accuracy import Tolerance
from lospmm.problem.convolution import Convolution
from lospmm.problem.device import Clocks
from lospmm.problem.dtype import FLOAT32, Dtype
from lospmm.problem.epilogue import PLAIN, Epilogue
from lospmm.problem.launch import Launch

#: What comes from memory at every launch: B ("cold"); A and B ("streamed", as in a model of many layers); only what the
#: L2 cache has no room for ("warm"); or all but B, code included ("network": other layers ran, the last one wrote B).
CacheState = Literal["cold", "warm", "streamed", "network"]

#: The cache states by name.
CACHE_STATES: Mapping[str, CacheState] = MappingProxyType({state: state for state in get_args(CacheState)})


@dataclass(frozen=True, slots=True, eq=False)
class Prepare:
    """The first request: which library to use, and the problem.

    The problem stays on the GPU until the worker ends or is given another, for the same library.
    """

    driver: str
    matrix: SparseMatrix  # its values as C is held to them
    n: int
    seed: int  # B is drawn from it, uniform between -1 and 1
    exponent: int  # and then scaled by this power of two, so that no sum overflows
    gate: bytes  # cubin of gate.cu
    tolerance: Tolerance
    dtype: Dtype = FLOAT32
    convolution: Convolution | None = None  # that takes B from an input
    epilogue: Epilogue = PLAIN  # with a residual for each copy, of C's shape
    cache: CacheState = "cold"  # what flushes it needs memory of its own

    @property
    def b_elements(self) -> int:
        """The number of elements of B."""
        return self.matrix.k * self.n if self.convolution is None else self.convolution.input_elements


@dataclass(frozen=True, slots=True)
class Ready:
    """The answer to ``Prepare``."""

    device: str
    copies: int  # of B and C
    release: str = ""  # the driver's own version


@dataclass(frozen=True, slots=True)
class Measure:
    """Check and time one kernel, whose arguments are B, C and the residual, if any.

    A large cubin stays in a file, which both processes can read.
    """

    cubin: bytes | Path
    entry: str
    shape: Launch
    cache: CacheState
    effort: Effort = FULL

    @property
    def image(self) -> bytes:
        """The cubin itself. Raises GpuFault where its file cannot be read."""
        if isinstance(self.cubin, bytes):
            return self.cubin
        with system_errors(GpuFault, f"{self.cubin}"):
            return self.cubin.read_bytes()


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result for one kernel: exactly one of ``timing`` and ``failure``.

    ``max_relative_error`` is that of ``lospmm.cpu.verify``, over all of C, infinite for an unwritten element; None if
    the kernel did not get so far. ``is_lost``: the worker gave no answer, as after a hang or a crash, which may not
    be the kernel's fault.
    """

    timing: Timing | None
    max_relative_error: float | None
    failure: str | None
    clocks: Clocks | None = None
    is_lost: bool = False

    def __post_init__(self) -> None:
        """Check that a kernel was timed, or failed."""
        assert (self.timing is None) != (self.failure is None), "a kernel was timed, or it failed"


@dataclass(frozen=True, slots=True)
class Answer:
    """The worker's answer to any request: a value or a fault. Unless ``healthy``, the worker then exits."""

    value: object = None
    fault: str | None = None
    is_disk: bool = False  # the fault is a DiskFault
    healthy: bool = True
    is_lost: bool = False  # the worker gave none


def channel() -> tuple[BinaryIO, BinaryIO]:
    """Return where a worker reads requests and where it writes answers. What others print goes to stderr from now."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return sys.stdin.buffer, answers


def send(stream: IO[bytes], message: object) -> None:
    """Write a message to a stream."""
    pickle.dump(message, stream, pickle.HIGHEST_PROTOCOL)
    stream.flush()


def receive(stream: IO[bytes]) -> object | None:
    """Read the next message of a stream; None at its end."""
    try:
        message: object = pickle.load(stream)
    except EOFError:
        return None
    return message
