"""Detection of this machine's GPU in the device table."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from lospmm.errors import BadRequest
from lospmm.problem.device import DEVICES, DRIVER_NAMES, DeviceSpec, find_device

#: File with the version of NVIDIA's driver for Linux.
DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")

_VERSION = re.compile(r"\d+\.\d+(\.\d+)?")


def own_gpu() -> str | None:
    """Return the name in ``DEVICES`` of this machine's first GPU; None without a known one."""
    name = _first_gpu()
    return None if name is None else DRIVER_NAMES.get(name.removeprefix("NVIDIA "))


def detect_device() -> DeviceSpec:
    """Return the row of ``DEVICES`` for the first GPU.

    Raises BadRequest where there is no GPU, or none that the table knows.
    """
    name = _first_gpu()
    if name is None:
        raise BadRequest("device auto: this machine has no NVIDIA GPU; name the one to tune for, such as h200")
    known = DRIVER_NAMES.get(name.removeprefix("NVIDIA "))
    if known is None:
        raise BadRequest(f"device auto: {name} is not in the device table; describe it in a file (docs/devices.md)")
    return DEVICES[known]


def device_of(name: str) -> DeviceSpec:
    """Return the device of that name or device file; "auto" is this machine's GPU. Raises BadRequest."""
    return detect_device() if name == "auto" else find_device(name)


def own_gpu_id() -> str:
    """Return 32 hexadecimal digits that identify this process's first GPU; empty without one.

    ``CUDA_VISIBLE_DEVICES`` decides which GPU is the first.
    """
    driver, gpu = _first()
    if gpu is None:
        return ""
    status, unique = driver.cuDeviceGetUuid(gpu)
    return bytes(unique.bytes).hex() if status == driver.CUresult.CUDA_SUCCESS else ""


def driver_version() -> str:
    """Return NVIDIA's driver version, as in "580.159.04", else the newest CUDA it supports, else ""."""
    with suppress(OSError):
        if found := _VERSION.search(DRIVER_VERSION_FILE.read_text()):
            return found[0]
    driver, gpu = _first()
    status, number = driver.cuDriverGetVersion() if gpu is not None else (None, 0)
    return f"CUDA {number // 1000}.{number % 1000 // 10}" if status == driver.CUresult.CUDA_SUCCESS else ""


def _first_gpu() -> str | None:
    """Return the driver's name of GPU 0, as in "NVIDIA H200"; None without a driver or a GPU."""
    driver, gpu = _first()
    if gpu is None:
        return None
    status, name = driver.cuDeviceGetName(256, gpu)
    return name.split(b"\0")[0].decode() if status == driver.CUresult.CUDA_SUCCESS else None


def _first() -> tuple[Any, Any]:
    """Return the driver's bindings, and its GPU 0 or None."""
    from cuda.bindings import driver  # loading a kernel needs none of them, and they take a while to import

    try:
        (status,) = driver.cuInit(0)
        if status != driver.CUresult.CUDA_SUCCESS:
            return driver, None
        status, gpu = driver.cuDeviceGet(0)
    except RuntimeError:  # the bindings find no libcuda
        return driver, None
    return driver, gpu if status == driver.CUresult.CUDA_SUCCESS else None
