"""What bounds a kernel of loops, by forecast: bytes from the L2 cache, instructions, and threads to hide both."""

from dataclasses import dataclass

from lospmm.families.lists import Lane
from lospmm.model import Problem, ceil_div

#: Microseconds that a launch takes, however little it does.
LAUNCH_MICROS = 2.5

#: Of the L2 cache's bytes a cycle and SM, what gathered rows of B reach: measured some 64 of 128 on an H200.
L2_BYTES_PER_CYCLE_AND_SM = 40.0

#: Instructions of single threads that an SM issues in a cycle.
INSTRUCTIONS_PER_CYCLE_AND_SM = 128.0

#: Threads of an SM with which it is busy.
BUSY_THREADS_PER_SM = 512


@dataclass(frozen=True, slots=True)
class Traffic:
    l2_bytes: float
    instructions: float  # of all threads
    threads: float  # of the whole grid
    tensor_flops: float = 0.0  # padded ones too
    tensor_flops_per_cycle_and_sm: float = 1.0


def micros_of(problem: Problem, traffic: Traffic) -> float:
    """Microseconds of a launch: what takes longest, on the SMs that have something to do."""
    device = problem.device
    busy = min(1.0, traffic.threads / (device.sms * BUSY_THREADS_PER_SM))
    per_second = device.sms * busy * device.clock_hz
    cycles = max(
        traffic.l2_bytes / L2_BYTES_PER_CYCLE_AND_SM,
        traffic.instructions / INSTRUCTIONS_PER_CYCLE_AND_SM,
        traffic.tensor_flops / traffic.tensor_flops_per_cycle_and_sm,
    )
    return LAUNCH_MICROS + cycles / per_second * 1e6


#: Cycles from a team's asking for a group of entries, or of rows of B, to the next: the latency of the L2 cache.
GATHER_CYCLES = 600.0


def gather_micros(
    problem: Problem,
    lane: Lane,
    *,
    entries: float,
    entry_bytes: int,
    teams: float,
    steps: float,
    group: int,
) -> float:
    """Microseconds of lists of ``entries``, padding included, whose rows of B are read from where they lie.

    ``teams`` of threads for each block of columns walk them, the longest in ``steps`` of ``group`` entries.
    """
    size, nnz, m, n = problem.dtype.element_bytes, problem.matrix.nnz, problem.matrix.m, problem.n
    blocks = ceil_div(n, lane.cols)
    device = problem.device
    sector = max(32, size * min(n, lane.cols))  # the L2 cache gives whole sectors
    per_entry = 4.0 + lane.vector * (2 if size == 2 else 1)
    bytes_of_memory = entries * entry_bytes + size * n * (problem.matrix.k + m)
    loops = LAUNCH_MICROS + steps * GATHER_CYCLES / device.clock_hz * 1e6
    reading = LAUNCH_MICROS + bytes_of_memory / device.memory_bandwidth * 1e6
    walking = micros_of(
        problem,
        Traffic(
            l2_bytes=blocks * (nnz * sector + entries * entry_bytes),
            instructions=blocks * lane.team * (entries * per_entry + teams * (60 + 8 * lane.vector)),
            threads=blocks * lane.team * teams,
        ),
    )
    return max(walking, reading, loops) + 0.02 * GATHER_CYCLES / group / device.clock_hz * 1e6 * steps
