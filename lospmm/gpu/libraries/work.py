"""A baseline in the worker process: the worker's command "baseline".

It uses the same A, B and C as the kernels, the same gate and the same clock.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from lospmm.gpu.gate import GateVerdict, Workbench, run_and_check
from lospmm.gpu.libraries import BaselineTime, time_baseline
from lospmm.gpu.libraries.library import Buffers, Enqueue, LibraryTask
from lospmm.gpu.messages import CacheState, Prepare
from lospmm.gpu.network import time_in
from lospmm.gpu.operands import fill, fill_a
from lospmm.gpu.timing import FULL, Effort, Timing
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.epilogue import PLAIN

#: The worker's name for ``run``, in its table of commands.
COMMAND = "baseline"


@dataclass(frozen=True, slots=True)
class BaselineTask:
    """Check and time a row of ``BASELINES``."""

    name: str
    cache: CacheState
    sputnik: Path | None = None
    effort: Effort = FULL
    is_searched: bool = False  # see LibraryTask


def run(bench: Workbench, task: BaselineTask) -> BaselineTime:
    """Time a baseline in the worker. Raises GpuFault."""
    driver, problem, operands = bench.driver, bench.problem, bench.operands
    problem = replace(problem, epilogue=PLAIN)  # no library adds anything to its product
    matrix = problem.matrix
    copies = [Buffers(b, c) for b, c in zip(operands.b, operands.c, strict=True)]

    def check(enqueue: Enqueue, limit: float | None, multiplied: SparseMatrix | None) -> GateVerdict:
        tolerance = problem.tolerance if limit is None else replace(problem.tolerance, sum_rounding=limit)
        held_to = replace(problem, tolerance=tolerance)
        if multiplied is None:
            return check_copies(enqueue, held_to)
        own = replace(held_to, matrix=multiplied)
        try:
            fill_a(driver, operands, own)
            return check_copies(enqueue, own)
        finally:
            fill_a(driver, operands, problem)

    def check_copies(enqueue: Enqueue, held_to: Prepare) -> GateVerdict:
        """Check the first and the last copy, to find a library that uses another copy than the given one."""
        verdicts, own = [], replace(bench, problem=held_to)
        for copy in dict.fromkeys((0, operands.copies - 1)):
            verdicts.append(run_and_check(own, enqueue, copy=copy))
            if verdicts[-1].failure is not None:
                fill(driver, operands, bench.problem)  # it may have written over A and B
                return verdicts[-1]
        return max(verdicts, key=lambda verdict: verdict.max_relative_error or 0.0)

    # Only A's nonzeros count: a library hardly reads less, so no copy of A stays in the cache.
    rotated = operands.rotated(task.cache, problem.dtype.element_bytes * matrix.nnz, driver.l2_bytes())

    def time(enqueue: Enqueue) -> Timing:
        return time_in(task.cache, bench, enqueue, copies=rotated, effort=task.effort)

    copies_of_a = rotated if task.cache == "streamed" else 1
    place = LibraryTask(
        driver, matrix, problem.n, copies, task.sputnik, problem.dtype, copies_of_a, is_searched=task.is_searched
    )
    return time_baseline(task.name, place, check=check, time=time)
