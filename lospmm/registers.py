"""Section 3.2: the registers that a thread will use, known before anything is compiled.

A thread holds an accumulator for each row of its tile and a buffer for each element of B in flight, for each of its
words; addresses and the calling convention take ``DeviceSpec.reserved_registers`` more, and where blocks share a tile
their mailboxes have addresses too. Registers are allocated in units, so the forecast is rounded up to one: the compiler
may use what would be lost anyway. It is also the ``--maxrregcount`` that the kernel is compiled with.
"""

import numpy as np

from lospmm.candidates import Candidates, Ints
from lospmm.device import DeviceSpec
from lospmm.model import Schedule
from lospmm.occupancy import allocated_registers

#: Elements of B at most that are taken apart and multiplied at a time, where a thread has several words: what is on its
#: way takes one register (``codegen.sass.double``).
TAKEN_APART = 7

#: The addresses of the mailboxes of a tile that blocks share: a pair for the others', one register for the own.
CLUSTER_REGISTERS = 3


def forecast_registers(rows: int, schedule: Schedule, device: DeviceSpec) -> int:
    """Registers per thread for tiles of up to ``rows`` rows; above the device's limit when the tile cannot fit."""
    return int(_forecast(np.array([schedule.thread_words * rows + _beside_rows(schedule)]), device)[0])


def forecast_of_each(candidates: Candidates, device: DeviceSpec) -> Ints:
    """``forecast_registers`` of many candidates at once."""
    return _forecast(candidates.thread_words * candidates.rows + candidates.by_schedule(_beside_rows), device)


def _beside_rows(schedule: Schedule) -> int:
    apart = (schedule.thread_words - 1) * min(schedule.prefetch, TAKEN_APART)
    return schedule.prefetch + apart + CLUSTER_REGISTERS * (schedule.split_k > 1)


def _forecast(figures: Ints, device: DeviceSpec) -> Ints:
    needed = figures + device.reserved_registers
    rounded = np.minimum(allocated_registers(needed, device), device.registers_per_thread)
    return np.maximum(needed, rounded)
