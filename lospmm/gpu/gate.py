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
    elements_of_b,
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
class Gate:
    """The loaded gate; ``passed`` has as many results as there is room for, the last used first."""

    check: Function
    differ: Function
    copy: Function  # of memory, for ``network.py``
    passed: list[Passed] = field(default_factory=list)


class GateVerdict(NamedTuple):
    """Result of a check; ``failure`` is None, or names the wrong element or the rows not written."""

    max_relative_error: float  # infinite where an element was never written
    failure: str | None


def load_gate(driver: Driver, cubin: bytes) -> Gate:
    """Load the kernels of the gate's cubin."""
    check, differ, copy = (driver.load(cubin, entry) for entry in (CHECK_ENTRY, DIFFER_ENTRY, COPY_ENTRY))
    return Gate(check, differ, copy)


def run_and_check(
    driver: Driver, gate: Gate, operands: DeviceOperands, problem: Prepare, enqueue: Callable[[int], None], *, copy: int
) -> GateVerdict:
    """Run ``enqueue(copy)`` on a C full of NaN and compare all of it. Raises GpuFault if the kernel fails."""
    poison(driver, operands, copy)
    enqueue(copy)
    driver.synchronize()  # a fault up to here is the kernel's, not the gate's
    known = _passed_before(driver, gate, operands, problem, copy)
    if known is not None:
        return GateVerdict(known.max_relative_error, None)
    verdict = _checked(driver, gate, operands, problem, copy)
    if verdict.failure is None:
        _keep(driver, gate, operands, Passed(operands.c[copy], problem, verdict.max_relative_error))
    return verdict


def _passed_before(driver: Driver, gate: Gate, operands: DeviceOperands, problem: Prepare, copy: int) -> Passed | None:
    """Return the result that this C equals, bit for bit, or None.

    Libraries add no epilogue, so their results count for another ``problem``.
    """
    for one in gate.passed:
        if one.problem is problem and not count_different(driver, gate, operands, operands.c[copy], one.address):
            gate.passed.remove(one)
            gate.passed.insert(0, one)
            return one
    return None


def _keep(driver: Driver, gate: Gate, operands: DeviceOperands, found: Passed) -> None:
    """Keep a copy of C, in place of the one that was used longest ago."""
    if not operands.kept:
        return
    is_full = len(gate.passed) == len(operands.kept)
    address = gate.passed.pop().address if is_full else operands.kept[len(gate.passed)]
    driver.copy(address, found.address, operands.c_bytes)
    gate.passed.insert(0, found._replace(address=address))


def _checked(driver: Driver, gate: Gate, operands: DeviceOperands, problem: Prepare, copy: int) -> GateVerdict:
    """Compare all of a C with float64."""
    driver.fill(operands.worst, 0, 4 * operands.m)
    driver.upload(operands.tolerance, np.array(astuple(problem.tolerance)))
    grid = (-(-operands.n // THREADS), min(operands.m, MAX_GRID_Y), 1)
    product = (operands.indptr, operands.indices, operands.values, operands.b[copy], operands.c[copy], operands.worst)
    epilogue = problem.epilogue
    bias = 0 if epilogue.bias is None else operands.bias
    residual = operands.residual[copy] if epilogue.residual else 0
    addresses = (*product, residual, bias, operands.window, operands.tolerance)
    sizes = (operands.m, operands.n, epilogue.relu, STORAGES[operands.dtype.storage])
    driver.launch(gate.check, Launch(grid, THREADS), (*map(np.uint64, addresses), *map(np.uint32, sizes)))
    keys = np.empty((2, operands.m), dtype=np.uint64)
    driver.download(keys, operands.worst)
    return _verdict(driver, operands, problem, keys, copy)


def count_different(driver: Driver, gate: Gate, operands: DeviceOperands, one: int, other: int) -> int:
    """Return in how many elements the copies of C at two addresses differ, bit by bit."""
    driver.fill(operands.worst, 0, 2)
    count = operands.m * operands.n
    size = np.uint32(operands.dtype.element_bytes)
    arguments = (np.uint64(one), np.uint64(other), np.uint64(count), np.uint64(operands.worst), size)
    driver.launch(gate.differ, Launch((min(DIFFER_BLOCKS, -(-count // THREADS)), 1, 1), THREADS), arguments)
    found = np.empty(1, dtype=np.uint64)
    driver.download(found, operands.worst)
    return int(found[0])


def _verdict(
    driver: Driver, operands: DeviceOperands, problem: Prepare, keys: NDArray[np.uint64], copy: int
) -> GateVerdict:
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
    dtype = operands.dtype
    stored = np.empty(1, dtype=operands.drawn.dtype)
    driver.download(stored, operands.c[copy] + dtype.element_bytes * place_of_c(problem, row, column))
    got, (expected, scale, allowed) = dtype.from_storage(stored)[0], _expected(operands, problem, row, column)
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
