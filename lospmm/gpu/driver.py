"""One GPU as the rest of the program sees it: a protocol of some twenty calls, and the libraries that speak it.

To add a library, write a class with these methods and add a row to ``DRIVERS``. A driver retains the primary context of
its GPU, never one of its own, so that the tensors and streams of torch, and libraries such as cuSPARSE, work beside it.
Every call may raise GpuFault with the driver's name of the error. After some errors (an illegal address, say) nothing
works any more in that process: what a GPU fault may cost is a process, see ``worker.py``.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lospmm.errors import GpuFault
from lospmm.gpu.protocol import Driver


def _cuda_core() -> Driver:
    from lospmm.gpu.cuda_core_driver import CudaCoreDriver

    return CudaCoreDriver()


def _pycuda() -> Driver:
    from lospmm.gpu.pycuda_driver import PycudaDriver

    return PycudaDriver()


#: By the name that LOSPMM_DRIVER takes. A row imports its library when it is called.
DRIVERS: Mapping[str, Callable[[], Driver]] = MappingProxyType({"cuda-core": _cuda_core, "pycuda": _pycuda})

#: What "auto" stands for: it installs without a toolkit.
DEFAULT_DRIVER = "cuda-core"


def open_driver(name: str = "auto") -> Driver:
    """The first GPU through the library of that name. Raises GpuFault where there is no such library, driver or GPU.

    The process's own choice is ``settings().driver``; the worker, which reads no settings, is told.
    """
    chosen = DEFAULT_DRIVER if name == "auto" else name
    if chosen not in DRIVERS:
        raise GpuFault(f"driver {name!r}: choose one of auto, {', '.join(DRIVERS)}")
    try:
        return DRIVERS[chosen]()
    except (ImportError, RuntimeError) as error:  # what PyCUDA and cuda.bindings raise where there is no libcuda
        raise GpuFault(f"driver {chosen!r} cannot be used: {error}") from error
