"""What the method must know of a GPU, as pure data: ``DeviceSpec`` and the table of known GPUs.

To add a GPU, add a row to ``DEVICES`` with its public source; a user may also name a file (``load_device``).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One GPU. Counts are per whole GPU unless the name says per SM, block or thread."""

    name: str  # the name that --device takes
    title: str  # the vendor's product name
    arch: str  # "sm_90"
    sms: int  # streaming multiprocessors
    warp_size: int  # threads
    registers_per_thread: int  # the most a thread can address (255 on every GPU so far)
    registers_per_block: int
    registers_per_sm: int
    register_unit: int  # a thread's registers are allocated in multiples of this (256 a warp: 8 a thread)
    reserved_registers: int  # what a thread needs beside accumulators and buffers of B: addresses, the ABI, slack
    threads_per_block: int
    threads_per_sm: int
    blocks_per_sm: int
    shared_bytes_per_sm: int
    shared_bytes_per_block: int  # the most a block may ask for (with the opt-in)
    reserved_shared_bytes: int  # what the runtime keeps of each block's shared memory: Constant of Equation 6
    l2_bytes: int
    peak_flops: float  # fp32, two operations per multiply-add, at boost clock, per second
    memory_bandwidth: float  # bytes per second
    clock_hz: float  # boost
    source: str  # where the figures are published
