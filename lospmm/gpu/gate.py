"""The correctness gate: a kernel is timed only if every element of its C is correct.

A kernel runs on a C full of NaN and is compared with float64, computed on the GPU from A in compressed rows
(``gate.cu``), or from a convolution's input. The largest error of an element is the ``Tolerance`` of its type
(``lospmm/problem/accuracy.py``); errors are relative to |A| |B|, the terms of the epilogue included.

Most kernels of one problem add up the same products in the same order. So a C that equals one that passed, bit by bit,
is not compared with float64 again, which takes a third of a brief timing.
"""

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lospmm.gpu.messages import Prepare
from lospmm.gpu.operands import (
    NAN_WORD,
    STORAGES,
    DeviceOperands,
    allocate,
    elements_of_b,
    fill,
    place_of_c,
    poison,
    residual_numbers,
)
from lospmm.gpu.protocol import Driver, Function
from lospmm.problem.accuracy import off_by
from lospmm.problem.launch import Launch

CHECK_ENTRY = "lospmm_check"
DIFFER_ENTRY = "lospmm_differ"
COPY_ENTRY = "lospmm_copy"

#: Registers per thread that the gate is compiled for.
REGISTERS = 64

#: Threads per block, and the most blocks along y (CUDA C++ Programming Guide, compute capabilities).
THREADS = 256
MAX_GRID_Y = 65_535

#: Blocks of the comparison of two results: some for every SM of any GPU.
DIFFER_BLOCKS = 1024

#: Rows that a message names.
NAMED_ROWS = 20


def gate_source() -> str:
    """Return the kernels as CUDA C++."""
    return Path(__file__).with_name("gate.cu").read_text()


class Passed(NamedTuple):
    """A copy of a C that passed (``DeviceOperands.kept``), and the problem that it is the result of."""

    address: int
    problem: Prepare
    max_relative_error: float


@dataclass(frozen=True, slots=True, eq=False)
class Workbench:
    """A problem on the GPU, and the loaded gate; ``passed`` has as many results as have room, the last used first."""

    driver: Driver
    problem: Prepare
    operands: DeviceOperands
    check: Function
    differ: Function
    copy: Function  # of memory, for ``network.py``
    passed: list[Passed] = field(default_factory=list)


class GateVerdict(NamedTuple):
    """Result of a check; ``failure`` is None, or names the wrong element or the rows not written."""

    max_relative_error: float  # infinite where an element was never written
    failure: str | None


def prepare(problem: Prepare, driver: Driver) -> Workbench:
    """Put the problem on the GPU. Raises GpuFault."""
    operands = allocate(driver, problem)
    fill(driver, operands, problem)
    check, differ, copy = (driver.load(problem.gate, entry) for entry in (CHECK_ENTRY, DIFFER_ENTRY, COPY_ENTRY))
    return Workbench(driver, problem, operands, check, differ, copy)


def run_and_check(bench: Workbench, enqueue: Callable[[int], None], *, copy: int) -> GateVerdict:
    """Run ``enqueue(copy)`` on a C full of NaN and compare all of it. Raises GpuFault if the kernel fails."""
    poison(bench.driver, bench.operands, copy)
    enqueue(copy)
    bench.driver.synchronize()  # a fault up to here is the kernel's, not the gate's
    known = _passed_before(bench, copy)
    if known is not None:
        return GateVerdict(known.max_relative_error, None)
    verdict = _checked(bench, copy)
    if verdict.failure is None:
        _keep(bench, Passed(bench.operands.c[copy], bench.problem, verdict.max_relative_error))
    return verdict


def _passed_before(bench: Workbench, copy: int) -> Passed | None:
    """Return the result that this C equals, bit for bit, or None.

    Libraries add no epilogue, so their results count for another problem.
    """
    for one in bench.passed:
        if one.problem is bench.problem and not count_different(bench, bench.operands.c[copy], one.address):
            bench.passed.remove(one)
            bench.passed.insert(0, one)
            return one
    return None


def _keep(bench: Workbench, found: Passed) -> None:
    """Keep a copy of C, in place of the one that was used longest ago."""
    passed, room = bench.passed, bench.operands.kept
    if not room:
        return
    address = passed.pop().address if len(passed) == len(room) else room[len(passed)]
    bench.driver.copy(address, found.address, bench.operands.c_bytes)
    passed.insert(0, found._replace(address=address))


def _checked(bench: Workbench, copy: int) -> GateVerdict:
    """Compare all of a C with float64."""
    driver, problem, operands = bench.driver, bench.problem, bench.operands
    driver.fill(operands.worst, 0, 4 * operands.m)
    driver.upload(operands.tolerance, np.array(astuple(problem.tolerance)))
    grid = (-(-operands.n // THREADS), min(operands.m, MAX_GRID_Y), 1)
    product = (operands.indptr, operands.indices, operands.values, operands.b[copy], operands.c[copy], operands.worst)
    epilogue = problem.epilogue
    bias = 0 if epilogue.bias is None else operands.bias
    residual = operands.residual[copy] if epilogue.residual else 0
    addresses = (*product, residual, bias, operands.window, operands.tolerance)
    sizes = (operands.m, operands.n, epilogue.relu, STORAGES[operands.dtype.storage])
    driver.launch(bench.check, Launch(grid, THREADS), (*map(np.uint64, addresses), *map(np.uint32, sizes)))
    keys = np.empty((2, operands.m), dtype=np.uint64)
    driver.download(keys, operands.worst)
    return _verdict(bench, keys, copy)


def count_different(bench: Workbench, one: int, other: int) -> int:
    """Return in how many elements the copies of C at two addresses differ, bit by bit."""
    driver, operands = bench.driver, bench.operands
    driver.fill(operands.worst, 0, 2)
    count = operands.m * operands.n
    size = np.uint32(operands.dtype.element_bytes)
    arguments = (np.uint64(one), np.uint64(other), np.uint64(count), np.uint64(operands.worst), size)
    driver.launch(bench.differ, Launch((min(DIFFER_BLOCKS, -(-count // THREADS)), 1, 1), THREADS), arguments)
    found = np.empty(1, dtype=np.uint64)
    driver.download(found, operands.worst)
    return int(found[0])


def _verdict(bench: Workbench, keys: NDArray[np.uint64], copy: int) -> GateVerdict:
    ratios, errors = (keys >> np.uint64(32)).astype(np.uint32)
    unwritten = np.flatnonzero(ratios == NAN_WORD)
    if len(unwritten):
        named = ", ".join(str(row) for row in unwritten[:NAMED_ROWS])
        more = f" and {len(unwritten) - NAMED_ROWS} more" if len(unwritten) > NAMED_ROWS else ""
        return GateVerdict(math.inf, f"rows not written in every column: {named}{more}")
    error = float(errors.max(keepdims=True).view(np.float32)[0])
    row = int(ratios.argmax())
    if ratios.view(np.float32)[row] <= 1:
        return GateVerdict(error, None)
    column = NAN_WORD - int(keys[0, row] & np.uint64(0xFFFFFFFF))  # counted down
    operands, dtype = bench.operands, bench.operands.dtype
    stored = np.empty(1, dtype=operands.drawn.dtype)
    bench.driver.download(stored, operands.c[copy] + dtype.element_bytes * place_of_c(bench.problem, row, column))
    got, (expected, scale, allowed) = dtype.from_storage(stored)[0], _expected(operands, bench.problem, row, column)
    failure = (
        f"row {row}, column {column}: got {got}, expected {expected} "
        f"({off_by(abs(float(got) - expected), scale, allowed)})"
    )
    return GateVerdict(error, failure)


def _expected(operands: DeviceOperands, problem: Prepare, row: int, column: int) -> tuple[float, float, float]:
    """Return an element of C in float64, |A| |B| with the epilogue's terms, and the largest error."""
    matrix, epilogue = problem.matrix, problem.epilogue
    span = slice(matrix.indptr[row], matrix.indptr[row + 1])
    terms = matrix.data[span].astype(np.float64) * elements_of_b(operands, problem, matrix.indices[span], column)
    added = []
    if epilogue.residual:
        numbers = residual_numbers(operands)
        place = place_of_c(problem, row, column) % len(numbers)
        added.append(float(operands.dtype.from_storage(numbers[place : place + 1])[0]))
    if epilogue.bias is not None:
        added.append(epilogue.bias[row])
    total, scale = float(terms.sum()) + sum(added), float(abs(terms).sum()) + sum(map(abs, added))
    expected = max(total, 0.0) if epilogue.relu else total
    allowed = problem.tolerance.allowed(*map(np.array, (scale, (terms**2).sum(), expected)))
    return expected, scale, float(allowed)
