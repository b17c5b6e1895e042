"""A kernel that can be launched from Python repeatedly, on any stream of an existing context.

The drivers of ``driver.py`` own a stream and pack their arguments for each launch. Here everything but the pointers
and the stream is packed once, and one call of libcuda is left: a few microseconds. Nothing is allocated on the GPU
and nothing waits, so that a CUDA graph can capture it. The context is the caller's, such as torch's.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

from lospmm.artifact.artifact import Artifact
from lospmm.errors import GpuFault
from lospmm.gpu.libraries.dense import CublasKernel
from lospmm.gpu.protocol import SHARED_BYTES_UNASKED, Driver
from lospmm.problem.dtype import dtype_named
from lospmm.problem.launch import Launch

#: CUfunction_attribute of the driver API.
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

#: CUresult: the calling thread has no context yet.
_INVALID_CONTEXT = 201

#: The most pointers of a kernel: B, C and a residual.
_POINTERS = 3


class _Config(ctypes.Structure):
    """CUlaunchConfig of the driver API (cuLaunchKernelEx, CUDA 11.8)."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class _Frame:
    """Configuration and arguments of one launch. Two threads never use the same frame at a time."""

    __slots__ = ("at_config", "at_pointers", "config", "pointers", "values")

    def __init__(self, shape: Launch) -> None:
        x, y, z = shape.grid
        self.config = _Config(x, y, z, shape.block, 1, 1, shape.shared_bytes, None, None, 0)
        self.values = (ctypes.c_uint64 * _POINTERS)()
        base, size = ctypes.addressof(self.values), ctypes.sizeof(ctypes.c_uint64)
        self.pointers = (ctypes.c_void_p * _POINTERS)(*(base + size * at for at in range(_POINTERS)))
        self.at_config, self.at_pointers = ctypes.byref(self.config), ctypes.byref(self.pointers)


class Launcher:
    """The kernel ``entry`` of a cubin, loaded into the current context. Raises GpuFault."""

    __slots__ = ("_call", "_frames", "_function", "_module", "_shape")

    def __init__(self, cubin: bytes, entry: str, shape: Launch) -> None:
        self._module = ctypes.c_void_p()
        _check(_library().cuModuleLoadData(ctypes.byref(self._module), cubin))
        self._take(entry, shape)

    def _take(self, entry: str, shape: Launch) -> None:
        library = _library()
        self._function, self._shape = ctypes.c_void_p(), shape
        _check(library.cuModuleGetFunction(ctypes.byref(self._function), self._module, entry.encode()))
        if shape.shared_bytes > SHARED_BYTES_UNASKED:
            attribute = _MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(library.cuFuncSetAttribute(self._function, attribute, ctypes.c_int(shape.shared_bytes)))
        self._call: Callable[..., int] = library.cuLaunchKernelEx
        self._frames = [_Frame(shape)]

    def __call__(self, stream: int, b: int, c: int, residual: int = 0) -> bool:
        """Launch it on a stream (a CUstream as a number) with the addresses of its operands.

        False where this thread has no context yet, and nothing was done. Raises GpuFault.
        """
        frames = self._frames
        try:
            frame = frames.pop()
        except IndexError:  # another thread is in the middle of a launch
            frame = _Frame(self._shape)
        values = frame.values
        values[0], values[1], values[2] = b, c, residual
        frame.config.stream = stream
        status = self._call(frame.at_config, self._function, frame.at_pointers, None)
        frames.append(frame)
        if status == _INVALID_CONTEXT:
            return False
        if status:
            _check(status)
        return True

    def shaped(self, shape: Launch) -> "Launcher":
        """Return the same code with another grid; it is unloaded with this one."""
        other = object.__new__(Launcher)
        other._module, other._function, other._call = self._module, self._function, self._call
        other._shape, other._frames = shape, [_Frame(shape)]
        return other

    def beside(self, entry: str, shape: Launch) -> "Launcher":
        """Return another kernel of the same cubin; it is unloaded with this one. Raises GpuFault."""
        other = object.__new__(Launcher)
        other._module = self._module
        other._take(entry, shape)
        return other

    def unload(self) -> None:
        """Free the code, once nothing launches it any more."""
        _library().cuModuleUnload(self._module)


#: Launches the kernel of an artifact, given a stream and the addresses of the operands.
ArtifactLauncher: TypeAlias = Launcher | CublasKernel


def open_launcher(kernel: Artifact, driver: Driver) -> ArtifactLauncher:
    """Load the kernel of an artifact: cuBLAS where its family is "dense", else its cubin. Raises GpuFault."""
    manifest = kernel.manifest
    if manifest["dense"] is not None:
        return CublasKernel(kernel.matrix(), manifest["n"], dtype_named(manifest["dtype"]), driver)
    return Launcher(kernel.cubin, manifest["name"], kernel.launch)


@cache
def _library() -> Any:
    """Load libcuda. Raises GpuFault where there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise GpuFault(f"the NVIDIA driver cannot be used: {error}") from None
    return library


def _check(status: int) -> None:
    """Raise GpuFault with the driver's name of an error, and what it says of it."""
    if status:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        _library().cuGetErrorName(status, ctypes.byref(name))
        _library().cuGetErrorString(status, ctypes.byref(text))
        raise GpuFault(f"{(name.value or b'CUDA error %d' % status).decode()}: {(text.value or b'').decode()}")
