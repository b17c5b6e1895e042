"""Section 5.2: the run-time arguments with which a proxy stands for the kernel of one tile size."""

import math

from lospmm.errors import BadRequest
from lospmm.ir import grid
from lospmm.model import Candidate, Launch, Problem
from lospmm.occupancy import active_blocks, resident_blocks, shared_bytes_for
from lospmm.registers import forecast_registers


def proxy_launch(problem: Problem, candidate: Candidate) -> Launch:
    """The kernel's grid and block, and the shared memory that admits as many blocks to an SM as the kernel has there.

    Raises BadRequest for a block that does not fit the device.
    """
    shared_bytes = shared_bytes_for(active_kernel_blocks(problem, candidate), problem.device)
    return Launch(_grid(problem, candidate), candidate.tile.cols, shared_bytes)


def active_kernel_blocks(problem: Problem, candidate: Candidate) -> int:
    """NUM_ATB of the candidate's kernel: Equation 5, and no more than the hardware has room for.

    Equation 5 as printed knows neither the limits on threads and blocks of an SM nor the units of allocation.
    """
    rows, threads = candidate.tile
    device = problem.device
    registers = forecast_registers(rows, candidate.schedule, device)
    resident = resident_blocks(device, threads=threads, registers_per_thread=registers, shared_bytes=0)
    blocks = math.prod(_grid(problem, candidate))
    active = min(active_blocks(blocks, threads * registers, device), resident)
    if active == 0:
        raise BadRequest(f"a block of {threads} threads with {registers} registers each does not fit {device.name}")
    return active


def _grid(problem: Problem, candidate: Candidate) -> tuple[int, int, int]:
    return grid(candidate.tiling.block_rows, problem.n, candidate.tile.cols, candidate.schedule.column_group)
