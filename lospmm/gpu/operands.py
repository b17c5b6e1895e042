"""A, B and C on the GPU: allocated once per problem, B and C in so many copies that the L2 cache holds no B."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    b: tuple[int, ...]  # float32, (k, n), row-major
    c: tuple[int, ...]  # float32, (m, n), row-major
    worst: int  # uint64, (m,), for the gate
    drawn: NDArray[np.float32]  # on the host: element i of B is number i, modulo its length

    @property
    def copies(self) -> int:
        return len(self.b)

    @property
    def b_bytes(self) -> int:
        return 4 * self.k * self.n

    @property
    def c_bytes(self) -> int:
        return 4 * self.m * self.n


def draw(problem: Prepare) -> NDArray[np.float32]:
    """The numbers that B repeats, at most DRAWN of them."""
    rng = np.random.default_rng(problem.seed)
    numbers = rng.uniform(-1.0, 1.0, size=min(DRAWN, problem.k * problem.n))
    return np.ldexp(numbers, problem.exponent).astype(np.float32)


def elements_of_b(operands: Operands, rows: NDArray[np.int32], column: int) -> NDArray[np.float32]:
    """B at ``rows`` of one column."""
    return operands.drawn[(rows.astype(np.int64) * operands.n + column) % len(operands.drawn)]


def allocate(driver: Driver, problem: Prepare) -> Operands:
    """Memory for the problem, nothing in it yet. Raises GpuFault where there is not enough, with what is needed."""
    per_copy = _aligned(4 * problem.k * problem.n) + _aligned(4 * problem.m * problem.n)
    fixed = problem.indptr.nbytes + problem.indices.nbytes + problem.values.nbytes + 8 * problem.m
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
        c=tuple(start + _aligned(4 * problem.k * problem.n) for start in starts),
        worst=driver.allocate(8 * problem.m),
        drawn=draw(problem),
    )


def fill(driver: Driver, operands: Operands, problem: Prepare) -> None:
    """Put A and every copy of B onto the GPU: at the start, and after a kernel that wrote what it should not."""
    driver.upload(operands.indptr, problem.indptr)
    if problem.values.size:
        driver.upload(operands.indices, problem.indices)
        driver.upload(operands.values, problem.values)
    period = len(operands.drawn)
    for address in operands.b:
        for start in range(0, operands.k * operands.n, period):
            driver.upload(address + 4 * start, operands.drawn[: operands.k * operands.n - start])


def release(driver: Driver, operands: Operands) -> None:
    """Give back what ``allocate`` took."""
    for address in (operands.b[0], operands.indptr, operands.indices, operands.values, operands.worst):
        driver.free(address)


def poison(driver: Driver, operands: Operands, copy: int) -> None:
    """Fill a C with NaN: an element that a kernel does not write is then seen."""
    driver.fill(operands.c[copy], NAN_WORD, operands.m * operands.n)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
