"""The time of a kernel estimated from what it asks of the GPU: the order of candidates where nothing can be measured.

An SM issues instructions, fetches code, waits for loads and takes in B; the GPU reads B and C. Each of these costs is
counted for the busiest SM, and the largest decides. The rates are fitted to kernels timed on one H200
(benchmarks/fit_estimate.py, docs/estimate.md); other GPUs are taken to be alike per SM and cycle. A choice made so is
marked in the manifest as not measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.model import Candidate, Problem, Tiling, ceil_div
from lospmm.occupancy import resident_blocks
from lospmm.registers import forecast_registers

INSTRUCTION_BYTES = 16
ISSUE_SLOTS = 4  # warp instructions that an SM starts per cycle


@dataclass(frozen=True, slots=True)
class Rates:
    """What cannot be read off a data sheet. The defaults are the fit of fit_estimate.json (benchmarks/results),
    rounded."""

    load_latency_cycles: float = 660.0  # that a group of ``prefetch`` loads of B adds to a block
    l2_bytes_per_cycle: float = 45.0  # of B, from the L2 cache to one SM while all read
    fetch_bytes_per_cycle: float = 2.1  # of straight-line code, to an SM with one resident block
    fetch_sharing: float = 0.44  # resident blocks walk different code: r of them fetch r to this power times as fast
    fetch_grouped: float = 1.15  # of that rate, where neighbouring SMs walk the same code
    launch_micros: float = 3.4
    sharpness: float = 3.2  # of the maximum: what lesser costs add as they come near the largest
    l2_share: float = 0.67  # of the L2 cache that B may fill and still be there for the next tile


RATES = Rates()


@dataclass(frozen=True, slots=True)
class Work:
    """What the blocks of one column of blocks do per thread, together."""

    loads: int
    instructions: int


def estimate_micros(problem: Problem, candidates: Sequence[Candidate], rates: Rates = RATES) -> NDArray[np.float64]:
    """Estimated microseconds of each candidate (a ``Ranker``: the lowest comes first)."""
    tilings = {id(candidate.tiling): candidate.tiling for candidate in candidates}
    work = {key: work_per_column(tiling) for key, tiling in tilings.items()}
    return np.array([micros(problem, candidate, work[id(candidate.tiling)], rates) for candidate in candidates])


def work_per_column(tiling: Tiling) -> Work:
    loads = int(tiling.nnc.sum())
    stores = sum(len(tile.rows) for tile in tiling.tiles) + len(tiling.empty_rows)
    return Work(loads, loads + int(tiling.nnz.sum()) + stores)


def micros(problem: Problem, candidate: Candidate, work: Work, rates: Rates) -> float:
    """Estimated microseconds of one candidate."""
    device, tile, schedule = problem.device, candidate.tile, candidate.schedule
    block_rows = candidate.tiling.block_rows
    registers = forecast_registers(tile.rows, schedule, device)
    resident = resident_blocks(device, threads=tile.cols, registers_per_thread=registers, shared_bytes=0)
    # The busiest SM decides: whole blocks, and whole waves of those that are resident together.
    blocks = ceil_div(block_rows * ceil_div(problem.n, tile.cols), device.sms)
    resident = min(max(resident, 1), blocks)
    loads, instructions = work.loads / block_rows, work.instructions / block_rows  # of a mean block

    issue = blocks * instructions * (tile.cols / device.warp_size) / ISSUE_SLOTS
    fetch_rate = rates.fetch_bytes_per_cycle * resident**rates.fetch_sharing
    if schedule.column_group != 1:
        fetch_rate *= rates.fetch_grouped
    fetch = blocks * instructions * INSTRUCTION_BYTES / fetch_rate
    latency = ceil_div(blocks, resident) * (1 + loads / schedule.prefetch) * rates.load_latency_cycles
    traffic = blocks * loads * tile.cols * 4 / rates.l2_bytes_per_cycle
    memory = _memory_bytes(problem, candidate, work, rates) / device.memory_bandwidth * device.clock_hz
    cycles: float = sum(cost**rates.sharpness for cost in (issue, fetch, latency, traffic, memory)) ** (
        1 / rates.sharpness
    )
    return rates.launch_micros + 1e6 * cycles / device.clock_hz


def _memory_bytes(problem: Problem, candidate: Candidate, work: Work, rates: Rates) -> float:
    """Bytes of B and C to and from memory. Where all column blocks of a tile come before the next tile's, a B that the
    L2 cache does not hold is read anew by every block row."""
    matrix = problem.matrix
    whole = 4 * problem.n * matrix.k
    again = candidate.schedule.column_group == 0 and whole > rates.l2_share * problem.device.l2_bytes
    return 4 * problem.n * (max(work.loads, matrix.k) if again else matrix.k) + 4 * problem.n * matrix.m
