"""The time of a kernel estimated from four costs, for the order of candidates where nothing can be measured.

This is a rule of thumb, not a model that was fitted: it says which of an SM's resources a tile size uses up first.
The constants are what ablations of unrolled kernels showed on an H200 (docs/estimate.md); other GPUs are taken to
be alike per SM and cycle. A choice made by it is marked as not measured in the manifest.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lospmm.model import Candidate, Problem, Tiling, ceil_div
from lospmm.occupancy import resident_blocks
from lospmm.registers import forecast_registers

INSTRUCTION_BYTES = 16
ISSUE_SLOTS = 4  # warp instructions that an SM starts per cycle
LOAD_LATENCY_CYCLES = 700.0  # of a load of B that misses the L1 cache, under load
L2_BYTES_PER_CYCLE = 42.0  # from the L2 cache to one SM, all SMs reading: 10 TB/s over 132 SMs
FETCH_BYTES_PER_CYCLE = 1.6  # of straight-line code to one thread block
FETCH_BYTES_PER_CYCLE_SM = 4.2  # of straight-line code to all blocks of an SM


def estimate_micros(problem: Problem, candidates: Sequence[Candidate]) -> NDArray[np.float64]:
    """Estimated microseconds of each candidate (a ``Ranker``: the lowest comes first)."""
    tilings = {id(candidate.tiling): candidate.tiling for candidate in candidates}
    work = {key: _work_per_column(tiling) for key, tiling in tilings.items()}
    return np.array([_micros(problem, candidate, work[id(candidate.tiling)]) for candidate in candidates])


def _work_per_column(tiling: Tiling) -> tuple[int, int]:
    """Loads, and all instructions, that the blocks of one column of blocks execute per thread."""
    loads = int(tiling.nnc.sum())
    stores = sum(len(tile.rows) for tile in tiling.tiles) + len(tiling.empty_rows)
    return loads, loads + int(tiling.nnz.sum()) + stores


def _micros(problem: Problem, candidate: Candidate, work: tuple[int, int]) -> float:
    device, tile, schedule = problem.device, candidate.tile, candidate.schedule
    block_cols = ceil_div(problem.n, tile.cols)
    block_rows = candidate.tiling.block_rows
    loads, instructions = (count / block_rows for count in work)  # of a mean block
    registers = forecast_registers(tile.rows, schedule, device)
    resident = max(resident_blocks(device, threads=tile.cols, registers_per_thread=registers, shared_bytes=0), 1)
    # The busiest SM decides: whole blocks, and whole waves of resident ones.
    blocks = ceil_div(block_rows * block_cols, device.sms)
    resident = min(resident, blocks)
    waves = ceil_div(blocks, resident)

    issue = blocks * instructions * (tile.cols / device.warp_size) / ISSUE_SLOTS
    fetch_rate = min(FETCH_BYTES_PER_CYCLE * resident, FETCH_BYTES_PER_CYCLE_SM)
    fetch = blocks * instructions * INSTRUCTION_BYTES / fetch_rate
    latency = waves * (1 + loads / schedule.prefetch) * LOAD_LATENCY_CYCLES
    traffic = blocks * loads * tile.cols * 4 / L2_BYTES_PER_CYCLE
    memory = 4 * problem.n * (problem.matrix.k + problem.matrix.m) / device.memory_bandwidth
    # The largest cost decides; what the others add grows as they come near it.
    cycles: float = (issue**4 + fetch**4 + latency**4 + traffic**4) ** 0.25
    return 1e6 * max(cycles / device.clock_hz, memory)
