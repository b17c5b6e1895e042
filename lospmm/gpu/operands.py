"""A, B and C on the GPU: allocated once per problem, with so many copies that no B stays in L2."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import GpuFault
from lospmm.gpu.messages import CacheState, Prepare
from lospmm.gpu.protocol import ALIGNMENT_BYTES, Driver
from lospmm.gpu.timing import COPIES_BEHIND, FLUSHED_COPIES, copies_beyond_l2
from lospmm.problem.convolution import Convolution, column_elements, guard_bits, output_elements, outside, row_elements
from lospmm.problem.dtype import Dtype

#: Random numbers that B repeats if it is larger: a prime, so that no stride of B coincides with the period.
DRAWN = (1 << 24) + 43

#: Draws that are kept: the layers of a model share a few shapes, and a draw takes up to a tenth of a second.
DRAWS = 4

#: Left free on the GPU: code, local memory and what libraries allocate.
RESERVE_BYTES = 512 << 20

#: Results that the gate keeps (``gate.Passed``), where there is room: kernels whose blocks share tiles add up in other
#: orders, and so do those of other families.
KEPT = 3

#: Multiple of the L2 cache that is read, and also written, before a launch, so that it replaces the contents.
FLUSHED = 1.6

#: The most copies of B and C by the state of the cache, where that flushes it.
MOST_COPIES: Mapping[CacheState, int] = MappingProxyType({"cold": FLUSHED_COPIES, "network": COPIES_BEHIND})

#: NaN in float32, and twice NaN in 16-bit types.
NAN_WORD = 0xFFFFFFFF

#: What gate.cu calls the types in memory.
STORAGES: Mapping[str, int] = MappingProxyType({"float32": 0, "float16": 1, "bfloat16": 2})

#: The bytes of its LospmmTolerance.
TOLERANCE_BYTES = 40


@dataclass(frozen=True, slots=True, eq=False)
class DeviceOperands:
    """Addresses on the GPU; ``b`` and ``c`` have one a copy, 2 or more unless one exceeds the cache."""

    m: int
    n: int
    indptr: int  # int64, (m + 1,)
    indices: int  # int32, (nnz,)
    values: int  # float32, (nnz,)
    b: tuple[int, ...]  # (k, n), row-major; or a convolution's input, NCHW
    c: tuple[int, ...]  # (m, n), row-major; or a convolution's output, NCHW
    residual: tuple[int, ...]  # as C, where the kernel takes one
    kept: tuple[int, ...]  # room for as many C
    bias: int  # float32, (m,), or 0
    window: int  # int32, (13,), of gate.cu, or 0
    tolerance: int  # of gate.cu
    worst: int  # uint64, (2, m), for the gate
    source: int  # B once more, behind it what is read and written to flush the L2 cache; or 0
    flush_bytes: int  # of either
    drawn: NDArray[Any]  # on the host, as they lie in memory: element i of B is number i, modulo its length
    b_elements: int
    dtype: Dtype  # of B, C and the residual

    @property
    def copies(self) -> int:
        """The number of copies of B and C."""
        return len(self.b)

    def rotated(self, cache: CacheState, a_bytes: int, l2_bytes: int) -> int:
        """Return the copies that launches rotate through: of B and C, and of A's ``a_bytes`` if streamed."""
        if cache == "streamed":
            return min(self.copies, copies_beyond_l2(a_bytes + self.b_bytes + self.c_bytes, l2_bytes))
        return copies_in_turn(cache, self.copies)

    @property
    def b_bytes(self) -> int:
        """The bytes of one B."""
        return self.dtype.element_bytes * self.b_elements

    @property
    def c_bytes(self) -> int:
        """The bytes of one C."""
        return self.dtype.element_bytes * self.m * self.n


def copies_in_turn(cache: CacheState, copies: int) -> int:
    """Return how many of the ``copies`` of B and C launches rotate through, if there is one A."""
    if cache == "network":
        return min(COPIES_BEHIND, copies)
    return copies if cache == "cold" else 1


def draw(problem: Prepare) -> NDArray[Any]:
    """Draw the numbers that B repeats, at most DRAWN of them, as they lie in memory."""
    return _drawn(problem.seed, min(DRAWN, problem.b_elements), problem.exponent, problem.dtype)


@lru_cache(DRAWS)
def _drawn(seed: int, count: int, exponent: int, dtype: Dtype) -> NDArray[Any]:
    numbers = np.random.default_rng(seed).uniform(-1.0, 1.0, size=count)
    drawn = dtype.to_storage(np.ldexp(numbers, exponent).astype(np.float32))
    drawn.setflags(write=False)
    return drawn


def elements_of_b(
    operands: DeviceOperands, problem: Prepare, rows: NDArray[np.int32], column: int
) -> NDArray[np.float32]:
    """Return B at ``rows`` of one column."""
    convolution, drawn = problem.convolution, operands.drawn
    if convolution is None:
        return operands.dtype.from_storage(drawn[(rows.astype(np.int64) * operands.n + column) % len(drawn)])
    own = np.array([column])
    places = row_elements(convolution, rows) + column_elements(convolution, own)
    inside = guard_bits(convolution, rows) & outside(convolution, own).astype(np.int64) == 0
    elements = operands.dtype.from_storage(drawn[np.where(inside, places, 0) % len(drawn)])
    return np.where(inside, elements, np.float32(0))


def place_of_c(problem: Prepare, row: int, column: int) -> int:
    """Return the offset of an element in C, and in the residual, in elements."""
    convolution = problem.convolution
    if convolution is None:
        return row * problem.n + column
    return int(output_elements(convolution, problem.matrix.m, np.array([column]))[0]) + row * convolution.pixels


#: The sizes of a window as gate.cu reads them, in this order.
WINDOW_SIZES = 13


def window_of(convolution: Convolution) -> NDArray[np.int32]:
    """Return the sizes of a convolution's window for gate.cu, (WINDOW_SIZES,)."""
    sizes = (
        *(convolution.channels, convolution.height, convolution.width),
        *(convolution.kernel_height, convolution.kernel_width),
        *(*convolution.stride, *convolution.padding, *convolution.dilation),
        *(convolution.out_height, convolution.out_width),
    )
    return np.array(sizes, dtype=np.int32)


def allocate(driver: Driver, problem: Prepare) -> DeviceOperands:
    """Allocate memory for the problem. Raises GpuFault, with the amount needed, if there is not enough."""
    size, matrix = problem.dtype.element_bytes, problem.matrix
    b_bytes, c_bytes = _aligned(size * problem.b_elements), _aligned(size * matrix.m * problem.n)
    per_copy = b_bytes + c_bytes * (1 + problem.epilogue.residual)
    needed = copies_beyond_l2(per_copy, driver.l2_bytes())
    most = MOST_COPIES.get(problem.cache, needed)
    is_flushed = problem.cache == "network" or needed > most
    flush_bytes = _aligned(int(FLUSHED * driver.l2_bytes())) if is_flushed else 0
    beside = b_bytes + 2 * flush_bytes if flush_bytes else 0
    fixed = matrix.indptr.nbytes + matrix.indices.nbytes + matrix.data.nbytes + 20 * matrix.m + beside
    free = driver.memory_bytes()[0] - fixed - RESERVE_BYTES
    least = min(needed, most)
    if least * per_copy > free:
        raise GpuFault(
            f"B and C of {matrix.k} x {problem.n} and {matrix.m} x {problem.n}, {least} of each, take "
            f"{least * per_copy / 2**30:.1f} GiB; {max(0, free) / 2**30:.1f} GiB are free on {driver.device_name()}"
        )
    copies = max(least, 2) if 2 * per_copy <= free else least  # a second C shows what differs from run to run
    kept = min(KEPT, (free - copies * per_copy) // c_bytes)
    start = driver.allocate(copies * per_copy + kept * c_bytes)
    starts = [start + per_copy * copy for copy in range(copies)]
    behind = start + copies * per_copy
    return DeviceOperands(
        m=matrix.m,
        n=problem.n,
        indptr=driver.allocate(matrix.indptr.nbytes),
        indices=driver.allocate(max(4, matrix.indices.nbytes)),
        values=driver.allocate(max(4, matrix.data.nbytes)),
        b=tuple(starts),
        c=tuple(start + b_bytes for start in starts),
        residual=tuple(start + b_bytes + c_bytes for start in starts) if problem.epilogue.residual else (),
        kept=tuple(behind + c_bytes * number for number in range(kept)),
        bias=0 if problem.epilogue.bias is None else driver.allocate(4 * matrix.m),
        window=0 if problem.convolution is None else driver.allocate(4 * WINDOW_SIZES),
        tolerance=driver.allocate(TOLERANCE_BYTES),
        worst=driver.allocate(16 * matrix.m),
        source=driver.allocate(beside) if beside else 0,
        flush_bytes=flush_bytes,
        drawn=draw(problem),
        b_elements=problem.b_elements,
        dtype=problem.dtype,
    )


def fill_a(driver: Driver, operands: DeviceOperands, problem: Prepare) -> None:
    """Copy A to the GPU, for the gate."""
    matrix = problem.matrix
    driver.upload(operands.indptr, matrix.indptr)
    if matrix.nnz:
        driver.upload(operands.indices, matrix.indices)
        driver.upload(operands.values, matrix.data)


def fill(driver: Driver, operands: DeviceOperands, problem: Prepare) -> None:
    """Copy A and every copy of B to the GPU: at the start, and after a kernel that wrote out of bounds."""
    fill_a(driver, operands, problem)
    if problem.epilogue.bias is not None:
        driver.upload(operands.bias, np.array(problem.epilogue.bias, np.float32))
    if problem.convolution is not None:
        driver.upload(operands.window, window_of(problem.convolution))
    for address in (*operands.b, *([operands.source] if operands.source else [])):
        _repeat(driver, address, operands.drawn, operands.b_elements)
    for address in operands.residual:
        _repeat(driver, address, residual_numbers(operands), operands.m * operands.n)


def residual_numbers(operands: DeviceOperands) -> NDArray[Any]:
    """Return the numbers that the residual repeats, as stored: B's in reverse, so that the two differ."""
    return np.ascontiguousarray(operands.drawn[::-1])


def _repeat(driver: Driver, address: int, numbers: NDArray[Any], count: int) -> None:
    for start in range(0, count, len(numbers)):
        driver.upload(address + numbers.itemsize * start, numbers[: count - start])


def release(driver: Driver, operands: DeviceOperands) -> None:
    """Free what ``allocate`` allocated."""
    fixed = (operands.indptr, operands.indices, operands.values, operands.tolerance, operands.worst)
    for address in (operands.b[0], *fixed, operands.bias, operands.window, operands.source):
        if address:
            driver.free(address)


def poison(driver: Driver, operands: DeviceOperands, copy: int) -> None:
    """Fill a C with NaN, which shows elements that a kernel does not write."""
    driver.fill(operands.c[copy], NAN_WORD, -(-operands.c_bytes // 4))  # the padding after it is unused


def padded_b_bytes(operands: DeviceOperands) -> int:
    """Return the bytes of B and its padding to the next aligned address."""
    return _aligned(operands.b_bytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
