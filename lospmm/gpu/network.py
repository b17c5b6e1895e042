"""Timing of a launch as in a network: after other layers, the last of which wrote B.

Then B is in the L2 cache, as far as it fits, and nothing else is: the code is in memory too (docs/decisions/0030).
"""

from collections.abc import Callable

import numpy as np

from lospmm.errors import GpuFault
from lospmm.gpu.gate import THREADS, Workbench
from lospmm.gpu.messages import CacheState
from lospmm.gpu.operands import padded_b_bytes
from lospmm.gpu.timing import Effort, Timing, time_behind, time_rotating
from lospmm.problem.launch import Launch

#: Bytes that a thread of gate.cu's copy moves.
WORD_BYTES = 16


def time_in(
    cache: CacheState, bench: Workbench, enqueue: Callable[[int], None], *, copies: int, effort: Effort
) -> Timing:
    """Time ``enqueue(copy)`` with the state of the cache that ``cache`` names. Raises GpuFault."""
    driver, operands = bench.driver, bench.operands

    def flush() -> None:
        driver.fill(operands.source + padded_b_bytes(operands), 0, 2 * operands.flush_bytes // 4)
        enqueue(0)  # its code, and A of other families, are in the cache again

    if cache == "network":
        return time_behind(driver, enqueue, layers_before(bench), copies=copies, effort=effort)
    if cache == "cold" and operands.flush_bytes:
        return time_rotating(driver, enqueue, copies=copies, effort=effort, before=flush)
    return time_rotating(driver, enqueue, copies=copies, effort=effort)


def layers_before(bench: Workbench) -> Callable[[int], None]:
    """Return work that exceeds the L2 cache and then writes a copy of B unchanged.

    Raises GpuFault where there is no memory for it.
    """
    operands = bench.operands
    if not operands.source:
        raise GpuFault("the problem was prepared for another state of the cache than network: prepare it anew")
    b_bytes, flush_bytes = padded_b_bytes(operands), operands.flush_bytes
    flushed = operands.source + b_bytes

    def write(from_: int, to: int, size: int) -> None:
        count = size // WORD_BYTES
        arguments = (np.uint64(from_), np.uint64(to), np.uint64(count))
        bench.driver.launch(bench.copy, Launch((-(-count // THREADS), 1, 1), THREADS), arguments)

    def before(copy: int) -> None:
        write(flushed, flushed + flush_bytes, flush_bytes)
        write(operands.source, operands.b[copy], b_bytes)

    return before
