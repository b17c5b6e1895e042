"""Messages between a ``Bench`` and its worker: immutable values, pickled, with their length before.

The worker imports this, so it depends only on NumPy and the small files beside it.
"""

import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Literal, get_args

from lospmm.errors import GpuFault
from lospmm.gpu.timing import FULL, Effort, Timing
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.accuracy import Tolerance
from lospmm.problem.convolution import Convolution
from lospmm.problem.device import Clocks
from lospmm.problem.dtype import FLOAT32, Dtype
from lospmm.problem.epilogue import PLAIN, Epilogue
from lospmm.problem.launch import Launch

#: Before every message: a mark, which stray output lacks, and the length in bytes.
HEADER = struct.Struct("<8sQ")
MARK = b"lospmm-1"

#: No message is longer: a matrix of 50 million nonzeros takes 400 MB, and so does its cubin.
MAX_MESSAGE_BYTES = 1 << 31

#: What comes from memory at every launch: B ("cold"), A and B ("streamed", as in a model of many layers), neither of
#: what fits the L2 cache ("warm"), or all but B, the code too ("network": B was just written, behind other layers).
CacheState = Literal["cold", "warm", "streamed", "network"]

#: The same by name.
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

    driver: str
    device: str
    driver_version: tuple[int, int]
    l2_bytes: int
    copies: int  # of B and C
    release: str = ""  # the driver's own version


@dataclass(frozen=True, slots=True)
class Measure:
    """Check and time one kernel, whose arguments are B, C and the residual, if any.

    A cubin of megabytes is better left in a file, which this process and the worker's see alike.
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
        try:
            return self.cubin.read_bytes()
        except OSError as error:
            raise GpuFault(f"{self.cubin}: {error.strerror}") from None


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


def packed(message: object) -> bytes:
    """Return a message as it is sent."""
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(MARK, len(content)) + content


def content_bytes(header: bytes) -> int:
    """Return the length of what follows a header. Raises GpuFault for anything else than a header."""
    mark, length = HEADER.unpack(header)
    if mark != MARK or length > MAX_MESSAGE_BYTES:
        raise GpuFault(f"not a message: it starts with {header!r}")
    return int(length)


def receive(stream: BinaryIO) -> object | None:
    """Read the next message of a stream; None at its end."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    content = stream.read(content_bytes(header))
    message: object = pickle.loads(content)
    return message
