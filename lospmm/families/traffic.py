"""Forecasts of kernels made of loops: bytes from the L2 cache, instructions, and threads to hide both."""

from dataclasses import dataclass

from lospmm.families.lane import Lane
from lospmm.problem.problem import Problem, ceil_div

#: Microseconds that a launch takes, however little it does.
LAUNCH_MICROS = 2.5

#: Bytes a cycle and SM that gathers of B's rows reach from L2: measured some 64 of 128 on an H200.
L2_BYTES_PER_CYCLE_AND_SM = 40.0

SECTOR_BYTES = 32

#: Instructions of single threads that an SM issues in a cycle.
INSTRUCTIONS_PER_CYCLE_AND_SM = 128.0

#: Threads of an SM with which it is busy.
BUSY_THREADS_PER_SM = 512


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a launch reads and computes."""

    l2_bytes: float
    instructions: float  # of all threads
    threads: float  # of the whole grid
    tensor_flops: float = 0.0  # padded ones too
    tensor_flops_per_cycle_and_sm: float = 1.0


def micros_of(problem: Problem, traffic: Traffic) -> float:
    """Predict the microseconds of a launch: the slowest resource, on the SMs that are used."""
    device = problem.device
    busy = min(1.0, traffic.threads / (device.sms * BUSY_THREADS_PER_SM))
    per_second = device.sms * busy * device.clock_hz
    cycles = max(
        traffic.l2_bytes / L2_BYTES_PER_CYCLE_AND_SM,
        traffic.instructions / INSTRUCTIONS_PER_CYCLE_AND_SM,
        traffic.tensor_flops / traffic.tensor_flops_per_cycle_and_sm,
    )
    return LAUNCH_MICROS + cycles / per_second * 1e6


#: Cycles of a warp that walks a list: before its first group of entries; for a group and for each entry of it, while
#: others wait too, and where few do; and to add up what several teams have. Fitted to hyb and csr on an H200.
WALK_CYCLES = 2200.0
GROUP_CYCLES, ENTRY_CYCLES = 900.0, 100.0
LONE_GROUP_CYCLES, LONE_ENTRY_CYCLES = 500.0, 50.0
ADD_CYCLES = 600.0

#: Share of the shorter times that is not hidden behind the longest.
NOT_HIDDEN = 0.2

#: Registers of a thread beside those of the entries on their way, and of the rows of B that they name.
WALK_REGISTERS = 40


def _gathered_bytes(problem: Problem, row_bytes: int) -> float:
    """Return the bytes that nonzeros gather from the L2 cache, one piece of a row of B each.

    The cache delivers whole sectors. Several short rows of B lie in one sector, and neighbouring nonzeros of a row of
    A read it once; their number is estimated for random places.
    """
    matrix = problem.matrix
    if row_bytes >= SECTOR_BYTES:
        return float(matrix.nnz) * row_bytes
    together = SECTOR_BYTES / row_bytes
    cells = matrix.m * matrix.k
    sectors = cells / together * (1.0 - (1.0 - matrix.nnz / max(1, cells)) ** together)
    return float(SECTOR_BYTES * min(matrix.nnz, sectors))


def gather_micros(
    problem: Problem,
    lane: Lane,
    *,
    entry_words: int,
    group: int,
    entries: float,
    walks: float,
    groups: float,
    shared_walks: float,
    longest: float,
) -> float:
    """Predict microseconds of a kernel that walks lists of ``entries``, padding included, and gathers B.

    Each block of columns walks them: ``walks`` by teams, of which ``shared_walks`` share a row with other teams,
    ``groups`` of ``group`` entries in all and ``longest`` in the longest walk.
    """
    device, size, n = problem.device, problem.dtype.element_bytes, problem.n
    blocks = ceil_div(n, lane.cols)
    l2_bytes = blocks * (_gathered_bytes(problem, size * min(n, lane.cols)) + entries * 4 * entry_words)
    memory_bytes = entries * 4 * entry_words + size * n * (problem.matrix.k + problem.matrix.m)
    registers = WALK_REGISTERS + group * (entry_words + lane.vector * size / 4)
    resident = device.sms * min(device.threads_per_sm, device.registers_per_sm / registers) / device.warp_size
    warps = blocks * lane.team / device.warp_size
    in_company = GROUP_CYCLES + ENTRY_CYCLES * group
    limits = (
        l2_bytes / (L2_BYTES_PER_CYCLE_AND_SM * device.sms),
        memory_bytes / device.memory_bandwidth * device.clock_hz,
        warps * (walks * WALK_CYCLES + shared_walks * ADD_CYCLES + groups * in_company) / resident,
        WALK_CYCLES + longest * (LONE_GROUP_CYCLES + LONE_ENTRY_CYCLES * group),
    )
    cycles = max(limits) + NOT_HIDDEN * (sum(limits) - max(limits))
    return LAUNCH_MICROS + cycles / device.clock_hz * 1e6
