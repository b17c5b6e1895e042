"""Occupancy (section 5.2): the thread blocks that an SM holds at a time, and how to limit them.

``active_blocks`` and ``shared_bytes_for`` are Equations 5 and 6. ``resident_blocks`` is what the hardware does, by the
rules of NVIDIA's occupancy calculator (cuda_occupancy.h of CUDA 13.0). It assumes the largest carve-out of shared
memory from the L1 cache: a launch must ask for that carve-out if it depends on the number.
"""

from typing import TypeVar

import numpy as np

from lospmm.problem.device import DeviceSpec
from lospmm.problem.problem import ceil_div
from lospmm.space.candidates import Ints, ceil_divs

#: One number, or one per candidate, (candidates,).
Count = TypeVar("Count", int, Ints)


def allocated_registers(per_thread: Count, device: DeviceSpec) -> Count:
    """Return the registers allocated for a thread that uses ``per_thread``: a multiple of the unit."""
    return _rounded_up(per_thread, device.register_unit)


def active_blocks(problem_blocks: int, registers_per_block: int, device: DeviceSpec) -> int:
    """Return NUM_ATB (Equation 5, as printed): thread blocks on an SM, by grid size and registers alone.

    0 if a block has more registers than an SM.
    """
    return min(ceil_div(problem_blocks, device.sms), device.registers_per_sm // registers_per_block)


def shared_bytes_for(active_blocks: int, device: DeviceSpec) -> int:
    """Return SharedMemorySize (Equation 6): the most bytes per block if an SM holds ``active_blocks``.

    ``active_blocks`` is 1 or more. Shared memory then holds exactly ``active_blocks`` blocks on every GPU of
    ``DEVICES``, up to its blocks_per_sm. There are two exceptions, where it holds more: on the V100 no multiple of its
    unit gives 23, 26, 28, 30 or 31 blocks, and if a device file caps a block at half an SM's shared memory or less, one
    block cannot keep a second one away. 0 if such blocks have no more than their reserved bytes.
    """
    share = device.shared_bytes_per_sm // active_blocks // device.shared_unit_bytes * device.shared_unit_bytes
    return max(0, min(share - device.reserved_shared_bytes, device.shared_bytes_per_block))


def resident_blocks(
    device: DeviceSpec, *, threads: Ints | int, registers_per_thread: Ints | int, shared_bytes: Ints | int
) -> Ints:
    """Return the thread blocks that one SM holds at a time, (launches,) or of one; 0 if the launch would fail.

    ``threads`` per block and ``registers_per_thread`` are 1 or more; a block asks for ``shared_bytes``.
    """
    threads, registers_per_thread, shared_bytes = map(np.asarray, (threads, registers_per_thread, shared_bytes))
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
    blocks: Ints = np.minimum.reduce(np.broadcast_arrays(*limits, device.blocks_per_sm))
    return np.where(starts, blocks, 0)


def registers_of_block(threads: Count, registers_per_thread: Count, device: DeviceSpec) -> Count:
    """Return the registers allocated for a block, as if each sub-partition of the SM had as many warps."""
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
