"""Section 5.2: the launch arguments with which a proxy stands for the kernel of one tile size."""

import math

from lospmm.codegen.ir import grid
from lospmm.errors import BadRequest
from lospmm.problem.lanes import lanes_of
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan, UnrolledPlans
from lospmm.space.constraints import mailbox_bytes_of_each
from lospmm.space.occupancy import active_blocks, resident_blocks, shared_bytes_for
from lospmm.space.registers import forecast_of_candidate


def proxy_launch(problem: Problem, candidate: UnrolledPlan) -> Launch:
    """Return the kernel's grid and block, with shared memory that gives the proxy the kernel's occupancy.

    Raises BadRequest for a block that does not fit the device.
    """
    shared_bytes = shared_bytes_for(active_kernel_blocks(problem, candidate), problem.device)
    return Launch(_grid(problem, candidate), candidate.tile.cols, max(shared_bytes, _mailbox_bytes(candidate)))


def kernel_launch(problem: Problem, candidate: UnrolledPlan) -> Launch:
    """Return the kernel's own launch, in which registers limit occupancy. Raises as ``proxy_launch``."""
    active_kernel_blocks(problem, candidate)
    return Launch(_grid(problem, candidate), candidate.tile.cols, _mailbox_bytes(candidate))


def active_kernel_blocks(problem: Problem, candidate: UnrolledPlan) -> int:
    """Return NUM_ATB of the candidate's kernel: Equation 5, within the limits of the hardware.

    Equation 5 as printed lacks the limits on threads and blocks of an SM and the units of allocation.
    """
    threads, device = candidate.tile.cols, problem.device
    registers = forecast_of_candidate(problem, candidate)
    shared = _mailbox_bytes(candidate)
    resident = int(resident_blocks(device, threads=threads, registers_per_thread=registers, shared_bytes=shared))
    blocks = math.prod(_grid(problem, candidate))
    active = min(active_blocks(blocks, threads * registers, device), resident)
    if active == 0:
        raise BadRequest(f"a block of {threads} threads with {registers} registers each does not fit {device.name}")
    return active


def _grid(problem: Problem, candidate: UnrolledPlan) -> tuple[int, int, int]:
    schedule = candidate.schedule
    block_rows = candidate.tiling.block_rows * schedule.split_k
    return grid(block_rows, problem.n // lanes_of(problem).columns, candidate.tile.cols, schedule.column_group)


def _mailbox_bytes(candidate: UnrolledPlan) -> int:
    """Return the shared memory of the candidate's mailboxes if its blocks share tiles, else 0."""
    return int(mailbox_bytes_of_each(UnrolledPlans.of([candidate]))[0])
