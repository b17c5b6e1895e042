"""Section 5.2: how many thread blocks an SM holds at a time, and the shared memory that holds a proxy to that number.

``active_blocks`` and ``shared_bytes_for`` are Equations 5 and 6. ``resident_blocks`` is what the hardware does, by the
rules of NVIDIA's occupancy calculator (cuda_occupancy.h of CUDA 13.0). It counts on the largest carve-out of shared
memory from the L1 cache: a launch should ask for it where the number must hold.
"""

from typing import TypeVar

import numpy as np

from lospmm.problem.device import DeviceSpec
from lospmm.problem.problem import ceil_div
from lospmm.space.candidates import Ints, ceil_divs

#: One figure, or one of each candidate.
Count = TypeVar("Count", int, Ints)


def allocated_registers(per_thread: Count, device: DeviceSpec) -> Count:
    """Registers that the hardware sets aside for a thread that uses ``per_thread``: a whole number of units."""
    return _rounded_up(per_thread, device.register_unit)


def active_blocks(problem_blocks: int, registers_per_block: int, device: DeviceSpec) -> int:
    """Equation 5, NUM_ATB as printed: thread blocks on one SM, by the size of the grid and by registers alone.

    0 for a block with more registers than an SM has.
    """
    return min(ceil_div(problem_blocks, device.sms), device.registers_per_sm // registers_per_block)


def shared_bytes_for(active_blocks: int, device: DeviceSpec) -> int:
    """Equation 6, SharedMemorySize: the most that each of ``active_blocks`` (1 or more) blocks of an SM can ask for.

    Shared memory then holds exactly ``active_blocks`` blocks on every GPU of ``DEVICES``, up to its blocks_per_sm, with
    two kinds of exception, where it holds more. On the V100 no multiple of its unit gives 23, 26, 28, 30 or 31 blocks.
    A device file may cap a block at half an SM's shared memory or less: one block then cannot keep a second one away.
    0 where so many blocks have only their reserved bytes, or less.
    """
    share = device.shared_bytes_per_sm // active_blocks // device.shared_unit_bytes * device.shared_unit_bytes
    return max(0, min(share - device.reserved_shared_bytes, device.shared_bytes_per_block))


def resident_blocks(device: DeviceSpec, *, threads: int, registers_per_thread: int, shared_bytes: int) -> int:
    """Thread blocks of ``threads`` threads that one SM holds at a time; 0 where the launch would fail.

    ``threads`` and ``registers_per_thread`` are 1 or more; ``shared_bytes`` is what a block asks for.
    """
    one, registers, shared = (np.array([figure]) for figure in (threads, registers_per_thread, shared_bytes))
    return int(resident_blocks_of_each(device, threads=one, registers_per_thread=registers, shared_bytes=shared)[0])


def resident_blocks_of_each(
    device: DeviceSpec, *, threads: Ints, registers_per_thread: Ints, shared_bytes: Ints
) -> Ints:
    """``resident_blocks`` of many launches at once."""
    starts = (
        (threads <= device.threads_per_block)
        & (registers_per_thread <= device.registers_per_thread)
        & (registers_of_block(threads, registers_per_thread, device) <= device.registers_per_block)
        & (shared_bytes <= device.shared_bytes_per_block)
    )
    warps = ceil_divs(threads, device.warp_size)
    limits = (
        device.threads_per_sm // device.warp_size // warps,
        _warps_by_registers(registers_per_thread, device) // warps,
        _blocks_by_shared_memory(shared_bytes, device),
    )
    blocks: Ints = np.minimum.reduce((*limits, np.full(len(warps), device.blocks_per_sm)))
    return np.where(starts, blocks, 0)


def registers_of_block(threads: Count, registers_per_thread: Count, device: DeviceSpec) -> Count:
    """Registers that a launch sets aside for a block: the same number of warps in every sub-partition of the SM."""
    whole = _rounded_up(threads, device.warp_size * device.sub_partitions)
    return whole * allocated_registers(registers_per_thread, device)


def _rounded_up(figure: Count, unit: int) -> Count:
    return figure + -figure % unit


def _warps_by_registers(registers_per_thread: Ints, device: DeviceSpec) -> Ints:
    per_warp = allocated_registers(registers_per_thread, device) * device.warp_size
    return device.registers_per_sm // device.sub_partitions // per_warp * device.sub_partitions


def _blocks_by_shared_memory(shared_bytes: Ints, device: DeviceSpec) -> Ints:
    taken = _rounded_up(shared_bytes + device.reserved_shared_bytes, device.shared_unit_bytes)
    return np.where(taken > 0, device.shared_bytes_per_sm // np.maximum(taken, 1), device.blocks_per_sm)
