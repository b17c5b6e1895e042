"""Section 3.2: the registers that a thread will use, known before anything is compiled.

A thread holds an accumulator for each row of its tile and a buffer for each element of B in flight; addresses and the
calling convention take ``DeviceSpec.reserved_registers`` more. Registers are allocated in units, so the forecast is
rounded up to one: the compiler may use what would be lost anyway. It is also the ``--maxrregcount`` that the kernel is
compiled with.
"""

from lospmm.device import DeviceSpec
from lospmm.model import Schedule
from lospmm.occupancy import allocated_registers


def forecast_registers(rows: int, schedule: Schedule, device: DeviceSpec) -> int:
    """Registers per thread for tiles of up to ``rows`` rows; above the device's limit when the tile cannot fit."""
    needed = rows + schedule.prefetch + device.reserved_registers
    return max(needed, min(allocated_registers(needed, device), device.registers_per_thread))
