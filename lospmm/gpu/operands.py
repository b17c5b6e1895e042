"""A, B and C on the GPU: allocated once per problem, B and C in so many copies that the L2 cache holds no B."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.convolution import Convolution, column_elements, guard_bits, output_elements, outside, row_elements
from lospmm.errors import GpuFault
from lospmm.gpu.driver import ALIGNMENT_BYTES, Driver
from lospmm.gpu.messages import Prepare
from lospmm.gpu.timing import copies_beyond_l2

#: The numbers that B is made of, over and over where it is larger: a prime, so that no stride of B meets its period.
DRAWN = (1 << 24) + 43

#: Left free on the GPU: code, local memory and what libraries allocate.
RESERVE_BYTES = 512 << 20

#: What 0xFFFFFFFF is in float32.
NAN_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """Addresses on the GPU. ``b`` and ``c`` have one for each copy, 2 or more unless one alone is beyond the cache."""

    m: int
    k: int
    n: int
    indptr: int  # int64, (m + 1,)
    indices: int  # int32, (nnz,)
    values: int  # float32, (nnz,)
    b: tuple[int, ...]  # float32, (k, n), row-major; or a convolution's input, NCHW
    c: tuple[int, ...]  # float32, (m, n), row-major; or a convolution's output, NCHW
    residual: tuple[int, ...]  # as C, where the kernel takes one
    bias: int  # float32, (m,), or 0
    window: int  # int32, (13,), of gate.cu, or 0
    worst: int  # uint64, (m,), for the gate
    drawn: NDArray[np.float32]  # on the host: element i of B is number i, modulo its length
    b_elements: int

    @property
    def copies(self) -> int:
        return len(self.b)

    @property
    def b_bytes(self) -> int:
        return 4 * self.b_elements

    @property
    def c_bytes(self) -> int:
        return 4 * self.m * self.n


def draw(problem: Prepare) -> NDArray[np.float32]:
    """The numbers that B repeats, at most DRAWN of them."""
    rng = np.random.default_rng(problem.seed)
    numbers = rng.uniform(-1.0, 1.0, size=min(DRAWN, problem.b_elements))
    return np.ldexp(numbers, problem.exponent).astype(np.float32)


def elements_of_b(operands: Operands, problem: Prepare, rows: NDArray[np.int32], column: int) -> NDArray[np.float32]:
    """B at ``rows`` of one column."""
    convolution, drawn = problem.convolution, operands.drawn
    if convolution is None:
        return drawn[(rows.astype(np.int64) * operands.n + column) % len(drawn)]
    own = np.array([column])
    places = row_elements(convolution, rows) + column_elements(convolution, own)
    inside = guard_bits(convolution, rows) & outside(convolution, own).astype(np.int64) == 0
    return np.where(inside, drawn[np.where(inside, places, 0) % len(drawn)], np.float32(0))


def place_of_c(problem: Prepare, row: int, column: int) -> int:
    """Where in C, and in the residual, an element lies, counted in elements."""
    convolution = problem.convolution
    if convolution is None:
        return row * problem.n + column
    return int(output_elements(convolution, problem.m, np.array([column]))[0]) + row * convolution.pixels


#: The sizes of a window as gate.cu reads them, in this order.
WINDOW_SIZES = 13


def window_of(convolution: Convolution) -> NDArray[np.int32]:
    """(WINDOW_SIZES,)."""
    sizes = (
        *(convolution.channels, convolution.height, convolution.width),
        *(convolution.kernel_height, convolution.kernel_width),
        *(*convolution.stride, *convolution.padding, *convolution.dilation),
        *(convolution.out_height, convolution.out_width),
    )
    return np.array(sizes, dtype=np.int32)


def allocate(driver: Driver, problem: Prepare) -> Operands:
    """Memory for the problem, nothing in it yet. Raises GpuFault where there is not enough, with what is needed."""
    b_bytes, c_bytes = _aligned(4 * problem.b_elements), _aligned(4 * problem.m * problem.n)
    per_copy = b_bytes + c_bytes * (1 + problem.residual)
    fixed = problem.indptr.nbytes + problem.indices.nbytes + problem.values.nbytes + 12 * problem.m
    free = driver.memory_bytes()[0] - fixed - RESERVE_BYTES
    least = copies_beyond_l2(per_copy, driver.l2_bytes())
    if least * per_copy > free:
        raise GpuFault(
            f"B and C of {problem.k} x {problem.n} and {problem.m} x {problem.n}, {least} of each, take "
            f"{least * per_copy / 2**30:.1f} GiB; {max(0, free) / 2**30:.1f} GiB are free on {driver.device_name()}"
        )
    copies = max(least, 2) if 2 * per_copy <= free else least  # a second C shows what differs from run to run
    start = driver.allocate(copies * per_copy)
    starts = [start + per_copy * copy for copy in range(copies)]
    return Operands(
        m=problem.m,
        k=problem.k,
        n=problem.n,
        indptr=driver.allocate(problem.indptr.nbytes),
        indices=driver.allocate(max(4, problem.indices.nbytes)),
        values=driver.allocate(max(4, problem.values.nbytes)),
        b=tuple(starts),
        c=tuple(start + b_bytes for start in starts),
        residual=tuple(start + b_bytes + c_bytes for start in starts) if problem.residual else (),
        bias=0 if problem.bias is None else driver.allocate(problem.bias.nbytes),
        window=0 if problem.convolution is None else driver.allocate(4 * WINDOW_SIZES),
        worst=driver.allocate(8 * problem.m),
        drawn=draw(problem),
        b_elements=problem.b_elements,
    )


def fill(driver: Driver, operands: Operands, problem: Prepare) -> None:
    """Put A and every copy of B onto the GPU: at the start, and after a kernel that wrote what it should not."""
    driver.upload(operands.indptr, problem.indptr)
    if problem.values.size:
        driver.upload(operands.indices, problem.indices)
        driver.upload(operands.values, problem.values)
    if problem.bias is not None:
        driver.upload(operands.bias, problem.bias)
    if problem.convolution is not None:
        driver.upload(operands.window, window_of(problem.convolution))
    for address in operands.b:
        _repeat(driver, address, operands.drawn, operands.b_elements)
    for address in operands.residual:
        _repeat(driver, address, residual_numbers(operands), operands.m * operands.n)


def residual_numbers(operands: Operands) -> NDArray[np.float32]:
    """What the residual repeats: the numbers of B backwards, so that neither stands for the other."""
    return np.ascontiguousarray(operands.drawn[::-1])


def _repeat(driver: Driver, address: int, numbers: NDArray[np.float32], count: int) -> None:
    for start in range(0, count, len(numbers)):
        driver.upload(address + 4 * start, numbers[: count - start])


def release(driver: Driver, operands: Operands) -> None:
    """Give back what ``allocate`` took."""
    for address in (operands.b[0], operands.indptr, operands.indices, operands.values, operands.worst):
        driver.free(address)


def poison(driver: Driver, operands: Operands, copy: int) -> None:
    """Fill a C with NaN: an element that a kernel does not write is then seen."""
    driver.fill(operands.c[copy], NAN_WORD, operands.m * operands.n)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
