"""Clocks, temperature and throttle reasons, read through NVML, the library below nvidia-smi.

A time without its clock cannot be compared with another. NVML comes with the driver; the few calls needed are made
through ctypes (NVML API reference, "Device Queries").
"""

import ctypes
from functools import cache

from lospmm.problem.device import Clocks

_SUCCESS = 0
_GRAPHICS_TEMPERATURE = 0  # NVML_TEMPERATURE_GPU
_SM, _MEMORY = 1, 2  # NVML_CLOCK_SM, NVML_CLOCK_MEM

#: nvmlClocksEventReason*, by bit. An idle GPU (bit 0) and clocks that an application has set (bit 1) are not faults.
REASONS = {
    0: "idle",
    1: "application clocks",
    2: "power cap",
    3: "hardware slowdown",
    4: "sync boost",
    5: "software thermal slowdown",
    6: "hardware thermal slowdown",
    7: "hardware power brake",
    8: "display clocks",
}


def read_clocks(bus_id: str) -> Clocks | None:
    """Read the clocks of the GPU at a PCI address; None where NVML is missing or does not tell."""
    try:
        nvml = _nvml()
        return None if nvml is None else _read(nvml, bus_id)
    except (OSError, AttributeError):  # no such library, or one without such a function
        return None


@cache
def _nvml() -> ctypes.CDLL | None:
    """Open NVML once; None where that fails. Opening takes longer than many a measurement."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    return nvml if nvml.nvmlInit_v2() == _SUCCESS else None


def _read(nvml: ctypes.CDLL, bus_id: str) -> Clocks | None:
    gpu = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(gpu)) != _SUCCESS:
        return None
    sm, memory, temperature, reasons = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()
    results = (
        nvml.nvmlDeviceGetClockInfo(gpu, _SM, ctypes.byref(sm)),
        nvml.nvmlDeviceGetClockInfo(gpu, _MEMORY, ctypes.byref(memory)),
        nvml.nvmlDeviceGetTemperature(gpu, _GRAPHICS_TEMPERATURE, ctypes.byref(temperature)),
        nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu, ctypes.byref(reasons)),
    )
    if any(result != _SUCCESS for result in results):
        return None
    return Clocks(sm.value, memory.value, temperature.value, reasons_of(reasons.value))


def reasons_of(bits: int) -> tuple[str, ...]:
    """Return the words for a mask of NVML's reasons; unknown ones by their bit."""
    return tuple(REASONS.get(bit, f"reason {bit}") for bit in range(64) if bits >> bit & 1)
