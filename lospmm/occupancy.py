"""Section 5.2: how many thread blocks an SM holds at a time, and the shared memory that holds a proxy to that number.

``active_blocks`` and ``shared_bytes_for`` are Equations 5 and 6. ``resident_blocks`` is what the hardware does, by the
rules of NVIDIA's occupancy calculator (cuda_occupancy.h of CUDA 13.0). It counts on the largest carve-out of shared
memory from the L1 cache: a launch should ask for it where the number must hold.
"""

from lospmm.device import DeviceSpec
from lospmm.model import ceil_div


def allocated_registers(per_thread: int, device: DeviceSpec) -> int:
    """Registers that the hardware sets aside for a thread that uses ``per_thread``: a whole number of units."""
    return ceil_div(per_thread, device.register_unit) * device.register_unit


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
    if threads > device.threads_per_block or registers_per_thread > device.registers_per_thread:
        return 0
    if shared_bytes > device.shared_bytes_per_block:
        return 0
    warps = ceil_div(threads, device.warp_size)
    return min(
        device.blocks_per_sm,
        device.threads_per_sm // device.warp_size // warps,
        _blocks_by_registers(threads, registers_per_thread, device),
        _blocks_by_shared_memory(shared_bytes, device),
    )


def registers_of_block(threads: int, registers_per_thread: int, device: DeviceSpec) -> int:
    """Registers that a launch sets aside for a block: the same number of warps in every sub-partition of the SM."""
    warps = ceil_div(ceil_div(threads, device.warp_size), device.sub_partitions) * device.sub_partitions
    return warps * device.warp_size * allocated_registers(registers_per_thread, device)


def _blocks_by_registers(threads: int, registers_per_thread: int, device: DeviceSpec) -> int:
    if registers_of_block(threads, registers_per_thread, device) > device.registers_per_block:
        return 0
    per_warp = allocated_registers(registers_per_thread, device) * device.warp_size
    warps_per_sm = device.registers_per_sm // device.sub_partitions // per_warp * device.sub_partitions
    return warps_per_sm // ceil_div(threads, device.warp_size)


def _blocks_by_shared_memory(shared_bytes: int, device: DeviceSpec) -> int:
    units = ceil_div(shared_bytes + device.reserved_shared_bytes, device.shared_unit_bytes)
    return device.shared_bytes_per_sm // (units * device.shared_unit_bytes) if units else device.blocks_per_sm
