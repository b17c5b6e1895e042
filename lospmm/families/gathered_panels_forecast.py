"""Forecast of a plan of ``gathered_panels``, by counting what an SM does for a block of it.

A step reads rows of B and fragments of A through the shared memory's 128 bytes a cycle, issues its instructions, and
keeps the tensor cores busy; the longest of these bounds it, as far as there are warps to overlap the rest. The
columns that a panel needs are estimated for random places of A's density.
"""

import math
from dataclasses import dataclass

from lospmm.families.traffic import LAUNCH_MICROS
from lospmm.problem.problem import Problem, ceil_div

#: Bytes that shared memory and the L1 cache deliver in a cycle.
SHARED_BYTES_PER_CYCLE = 128.0

#: Cycles of an SM for one product of fragments (m16n8k16 of 16-bit numbers, m16n8k8 of TF32).
CYCLES_PER_PRODUCT = 1.6

#: Bytes from L2 in a cycle and SM.
L2_BYTES_PER_CYCLE = 48.0

#: Warps of an SM with which its pipes are busy.
BUSY_WARPS = 12.0

#: How much fuller the masks of steps are than those of columns, by subgroups of a panel (measured on random places).
MASK_FILL = {1: 0.0, 2: 0.14, 3: 0.17, 4: 0.19, 8: 0.52}


@dataclass(frozen=True, slots=True)
class PanelWork:
    """Figures of a plan that decide its time; ``columns`` rows of B are needed in all."""

    subgroups: int
    warps: int
    parts: int
    cols: int
    slabs: int
    stages: int
    columns: int
    shared_bytes: int
    registers: int


def micros_of(problem: Problem, work: PanelWork) -> float:
    """Predict the microseconds of a plan."""
    device, size = problem.device, problem.dtype.element_bytes
    split = problem.dtype.parts
    each, tiles = 8 // size, work.cols // 16
    steps, fragments = _steps_and_fragments(problem, work, each)
    panels = work.warps // work.parts
    row_blocks = ceil_div(ceil_div(problem.matrix.m, 8), work.subgroups * panels)
    blocks = row_blocks * ceil_div(problem.n, work.cols)

    row_bytes = work.cols * size
    staged = work.columns * row_bytes
    loaded = panels * (fragments * 256 * split + steps * 96)
    shared = staged + loaded + panels * steps * 4 * each * row_bytes
    products = panels * fragments * tiles * (2 * split - 1)
    instructions = (
        panels * steps * (30 + work.subgroups * tiles * (2 * split - 1) + 5 * tiles * split) + staged / 16 / 32 * 14
    )
    cycles = max(
        shared / SHARED_BYTES_PER_CYCLE,
        instructions / 4,
        products * CYCLES_PER_PRODUCT,
        (staged + loaded) / L2_BYTES_PER_CYCLE,
    )
    resident = max(
        1,
        min(
            device.shared_bytes_per_sm // (work.shared_bytes + device.reserved_shared_bytes),
            device.registers_per_sm // (work.registers * 32 * work.warps),
        ),
    )
    at_once = min(float(resident), blocks / device.sms) * work.warps
    rounds = max(blocks / device.sms, 1.0)
    rounds = math.ceil(rounds) if rounds <= resident else rounds + 0.5
    busy = min(1.0, math.pow(at_once / BUSY_WARPS, 0.7))
    memory = problem.n * (problem.matrix.k + problem.matrix.m) * size / device.memory_bandwidth
    start = work.stages / work.slabs * staged / (device.memory_bandwidth / device.sms) / max(1, work.stages)
    return LAUNCH_MICROS + 1e6 * (max(memory, rounds * cycles / float(busy) / device.clock_hz) + start)


def _steps_and_fragments(problem: Problem, work: PanelWork, each: int) -> tuple[float, float]:
    """Return the steps and fragments of a panel over all its slabs."""
    matrix = problem.matrix
    filled = max(1e-9, 1 - (1 - matrix.nnz / (matrix.m * max(1, work.columns))) ** 8)
    needed = 1 - (1 - filled) ** work.subgroups
    a_queue = work.columns * needed / 4 / work.slabs
    longest = a_queue + 1.03 * math.sqrt(max(0.0, a_queue * (1 - needed)))
    steps = work.slabs * max(1.0, longest / each + 0.4)
    share = filled / needed
    fill = share + MASK_FILL[work.subgroups] * (1 - share)
    return steps, steps * work.subgroups * fill
