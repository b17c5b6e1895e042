"""Analytic estimate of a kernel's time, which ranks candidates where nothing is timed.

An SM issues instructions, fetches code, waits for loads and reads B from the L2 cache; the GPU moves B and C. Each of
these costs is counted for the busiest SM, and the largest decides. The rates are fitted to kernels timed on one H200
(rank_model/fitting/fit_estimate.py, docs/estimate.md); other GPUs are assumed alike per SM and cycle. The manifest
marks a choice made by the estimate as not measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.problem import Problem
from lospmm.space.candidates import Ints, UnrolledPlan, UnrolledPlans, ceil_divs
from lospmm.space.constraints import mail_bytes_of_each, mailbox_bytes_of_each
from lospmm.space.occupancy import resident_blocks
from lospmm.space.registers import forecast_of_each

INSTRUCTION_BYTES = 16
ISSUE_SLOTS = 4  # warp instructions that an SM starts per cycle

#: Instructions for each row of a tile and each further block that shares it: a store to the owner, a load, an addition.
EXCHANGE_INSTRUCTIONS = 3


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a GPU that no data sheet gives.

    The defaults are the rounded fit of fit_estimate.json (rank_model/data).
    """

    load_latency_cycles: float = 640.0  # added to a block by a group of ``prefetch`` loads of B
    l2_bytes_per_cycle: float = 45.0  # of B, from the L2 cache to one SM while all SMs read
    request_cycles: float = 2.7  # least cycles of a warp's load, however few its bytes (narrow.jsonl)
    fetch_bytes_per_cycle: float = 2.1  # of straight-line code, to an SM with one resident block
    fetch_sharing: float = 0.48  # exponent: r resident blocks, running different code, fetch r ** this times as fast
    fetch_grouped: float = 1.1  # factor on the fetch rate if neighbouring SMs run the same code
    launch_micros: float = 2.9
    sharpness: float = 3.1  # exponent of the soft maximum: lower lets lesser costs add more
    l2_share: float = 0.6  # of the L2 cache: B may fill it and still be there for the next tile
    exchange_cycles: float = 3400.0  # for a block that shares its tile; fitted when its cluster met twice
    mail_bytes_per_cycle: float = 14.0  # from a block to the others of its cluster


RATES = Rates()


def estimate_micros(problem: Problem, candidates: Sequence[UnrolledPlan], rates: Rates = RATES) -> NDArray[np.float64]:
    """Return the estimated microseconds of each candidate, (candidates,): a ``Ranker``."""
    return micros_of(problem, costs_of(problem, work_of(problem, UnrolledPlans.of(candidates)), rates), rates)


class Costs(NamedTuple):
    """Cycles of the busiest SM for each resource of the GPU, (candidates,) each."""

    issue: NDArray[np.float64]  # of instructions
    fetch: NDArray[np.float64]  # of instructions
    latency: NDArray[np.float64]  # of loads of B
    traffic: NDArray[np.float64]  # of B, from the L2 cache
    memory: NDArray[np.float64]  # B and C


def micros_of(problem: Problem, costs: Costs, rates: Rates = RATES) -> NDArray[np.float64]:
    """Return the estimated microseconds, (candidates,): the soft maximum of ``costs``, plus the launch."""
    total = np.zeros(len(costs.issue))
    for cost in costs:
        total += cost**rates.sharpness
    cycles = total ** (1 / rates.sharpness)
    return rates.launch_micros + 1e6 * cycles / problem.device.clock_hz


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The work of the busiest SM, (candidates,) each."""

    candidates: UnrolledPlans
    blocks: Ints  # of the busiest SM, without those that only store the zeros of empty rows
    resident: Ints  # blocks that run at a time, at most ``blocks``
    loads: NDArray[np.float64]  # of a thread, in a mean block
    instructions: NDArray[np.float64]  # of a thread, in a mean block
    column_loads: Ints  # of a thread in each block of one column of blocks, in total

    def take(self, which: NDArray[np.integer]) -> "Work":
        """Return the work of the candidates at the indices ``which``."""
        figures = (self.blocks, self.resident, self.loads, self.instructions, self.column_loads)
        return Work(self.candidates.take(which), *(figure[which] for figure in figures))


def work_of(problem: Problem, candidates: UnrolledPlans) -> Work:
    """Return the work of the busiest SM for each candidate."""
    device, split = problem.device, candidates.split_k
    tiles = candidates.by_tiling(lambda tiling: max(tiling.count, 1)) * split
    across = ceil_divs(problem.n, candidates.block_cols)
    busy_sms = candidates.by_schedule(lambda schedule: device.sms_of_clusters(schedule.split_k))
    blocks = ceil_divs(tiles * across, busy_sms)
    resident = resident_blocks(
        device,
        threads=candidates.cols,
        registers_per_thread=forecast_of_each(problem, candidates),
        shared_bytes=mailbox_bytes_of_each(candidates),
    )
    loads = candidates.by_tiling(lambda tiling: int(tiling.nnc.sum()))
    arithmetic = candidates.by_tiling(lambda tiling: int(tiling.nnz.sum()))
    filled = candidates.by_tiling(lambda tiling: len(tiling.rows))
    empty = candidates.by_tiling(lambda tiling: len(tiling.empty_rows))
    exchanged = EXCHANGE_INSTRUCTIONS * (split - 1) * filled
    words = candidates.thread_words
    converted = words * loads if problem.dtype.is_16_bit else 0  # each loaded element, to float32
    zeros = empty * across / (busy_sms * blocks)  # stores of blocks without a tile: spread over all SMs
    return Work(
        candidates,
        blocks,
        np.minimum(np.maximum(resident, 1), blocks),
        loads / tiles,
        (loads + converted + words * arithmetic + filled + exchanged) / tiles + zeros,
        loads,
    )


def costs_of(problem: Problem, work: Work, rates: Rates = RATES) -> Costs:
    """Return the cycles that ``work`` takes at ``rates``."""
    device, candidates, blocks = problem.device, work.candidates, work.blocks
    issue = blocks * work.instructions * (candidates.cols / device.warp_size) / ISSUE_SLOTS
    sharing = np.arange(work.resident.max(initial=0) + 1) ** rates.fetch_sharing
    grouped = np.where(candidates.column_group != 1, rates.fetch_grouped, 1.0)
    fetch_rate = rates.fetch_bytes_per_cycle * sharing[work.resident] * grouped
    fetch = blocks * work.instructions * INSTRUCTION_BYTES / fetch_rate
    in_flight = candidates.by_schedule(lambda schedule: schedule.prefetch)
    mail = mail_bytes_of_each(candidates) / rates.mail_bytes_per_cycle
    exchange = np.where(candidates.split_k > 1, rates.exchange_cycles + mail, 0.0)
    waves = ceil_divs(blocks, work.resident)
    latency = waves * ((1 + work.loads / in_flight) * rates.load_latency_cycles + exchange)
    warp_bytes = device.warp_size * candidates.thread_words * problem.dtype.element_bytes
    requested = np.maximum(warp_bytes / rates.l2_bytes_per_cycle, rates.request_cycles)
    traffic = blocks * work.loads * (candidates.cols / device.warp_size) * requested
    memory = _memory_bytes(problem, work, rates) / device.memory_bandwidth * device.clock_hz
    return Costs(issue, fetch, latency, traffic, np.broadcast_to(memory, issue.shape))


def _memory_bytes(problem: Problem, work: Work, rates: Rates) -> Ints:
    """Return the bytes of B and C moved to and from memory, (candidates,).

    If all column blocks of a tile come before the next tile's and B does not fit the L2 cache, every block row reads B
    again.
    """
    matrix = problem.matrix
    row_bytes = problem.dtype.element_bytes * problem.n
    again = row_bytes * matrix.k > rates.l2_share * problem.device.l2_bytes
    anew = (work.candidates.column_group == 0) & again
    read = np.where(anew, np.maximum(work.column_loads, matrix.k), matrix.k)
    return row_bytes * (read + matrix.m)
