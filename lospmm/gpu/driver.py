"""The libraries that implement ``gpu.protocol``, by name: how a process opens one GPU.

To add a library, write a module with a class of the methods of ``Driver`` and its ``open_gpu``, and add a row to
``DRIVERS``. A driver retains the primary context of its GPU, never one of its own, so that the tensors and streams of
torch, and libraries such as cuSPARSE, work beside it. Every call may raise GpuFault with the driver's name of the
error. After some errors, such as an illegal address, nothing works any more in that process: a GPU fault may cost a
process, see ``worker.py``.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import cast

from lospmm.errors import GpuFault
from lospmm.gpu.protocol import Driver

#: The module of each library, by the name that LOSPMM_DRIVER takes. It is imported when it is opened: PyCUDA is an
#: extra, and the worker imports no more than it uses.
DRIVERS: Mapping[str, str] = MappingProxyType(
    {"cuda-core": "lospmm.gpu.cuda_core_driver", "pycuda": "lospmm.gpu.pycuda_driver"}
)

#: What "auto" stands for: it installs without a toolkit.
DEFAULT_DRIVER = "cuda-core"


def open_driver(name: str = "auto") -> Driver:
    """Open the first GPU through the library of that name.

    The process's own choice is ``settings().driver``; the worker, which reads no settings, is told. Raises GpuFault
    where there is no such library, driver or GPU.
    """
    chosen = DEFAULT_DRIVER if name == "auto" else name
    if chosen not in DRIVERS:
        raise GpuFault(f"driver {name!r}: choose one of auto, {', '.join(DRIVERS)}")
    try:
        return cast(Driver, import_module(DRIVERS[chosen]).open_gpu())
    except (ImportError, RuntimeError) as error:  # what PyCUDA and cuda.bindings raise where there is no libcuda
        raise GpuFault(f"driver {chosen!r} cannot be used: {error}") from error
