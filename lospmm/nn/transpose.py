"""Operator ``lospmm::transposed``: transposes 16- or 32-bit matrices through shared memory.

PyTorch's copy of a transposed tensor touches one line of memory for every element. Compiled models do not need this:
torch.compile fuses a transpose with what computes its input.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from lospmm import gpu
from lospmm.errors import GpuFault
from lospmm.gpu.launcher import Launcher
from lospmm.problem.problem import Launch

#: Entry of the kernel for each element size in bytes.
ENTRIES: Mapping[int, str] = MappingProxyType({4: "lospmm_transpose", 2: "lospmm_transpose_16"})

#: Machine code for the GPUs of the device table, and PTX for later ones; from transpose.cu, by ``make golden``.
CODE = Path(gpu.__path__[0], "transpose.fatbin")

#: Threads of a block (as in transpose.cu), blocks for each SM.
_THREADS, _BLOCKS = 256, 6

#: Alignment of both matrices in bytes: the kernel loads four floats at a time.
_ALIGNMENT = 16

#: Element types that the kernels take.
_TYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

#: Loaded kernels by GPU and element size; empty for a GPU that CODE is not for, where PyTorch's copy runs.
_LAUNCHERS: dict[int, Mapping[int, Launcher]] = {}

_LIBRARY = torch.library.Library("lospmm", "FRAGMENT")
_LIBRARY.define("transposed(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def prepare(device: torch.device) -> None:
    """Load the kernels on a GPU."""
    if device.index in _LAUNCHERS:
        return
    try:
        blocks = _BLOCKS * torch.cuda.get_device_properties(device).multi_processor_count
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # gives the process and this thread a context
            code, launch = CODE.read_bytes(), Launch((blocks, 1, 1), _THREADS)
            _LAUNCHERS[device.index] = {size: Launcher(code, entry, launch) for size, entry in ENTRIES.items()}
    except GpuFault:
        _LAUNCHERS[device.index] = {}


def turned(x: Tensor) -> Tensor:
    """Return ``x`` (rows, columns) as a contiguous (columns, rows): a view if its transpose is contiguous."""
    view = x.t()
    if view.is_contiguous() or torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad):
        return view.contiguous()
    return transposed(x)


def turn_into(x: Tensor, to: Tensor) -> None:
    """Write ``x`` (rows, columns) to contiguous ``to`` (columns, rows), outside compile and autograd."""
    if not _is_launched(x, to):
        to.copy_(x.t())


def _transposed(x: Tensor) -> Tensor:
    to = torch.empty((x.shape[1], x.shape[0]), dtype=x.dtype, device=x.device)
    return to if _is_launched(x, to) else _by_pytorch(x)


def _is_launched(x: Tensor, to: Tensor) -> bool:
    """Launch the kernel on the current stream; return whether it could be."""
    launcher = _LAUNCHERS.get(x.get_device(), {}).get(x.element_size())
    if launcher is None or x.dtype not in _TYPES or not x.is_contiguous() or x.numel() == 0:
        return False
    if torch._C._cuda_getDevice() != x.get_device():
        return False
    given, found = x.data_ptr(), to.data_ptr()
    if (given | found) % _ALIGNMENT:
        return False
    rows, columns = x.shape
    stream = torch._C._cuda_getCurrentRawStream(x.get_device())
    return launcher(stream, given, found, rows | columns << 32)


def _by_pytorch(x: Tensor) -> Tensor:
    return x.t().clone(memory_format=torch.contiguous_format)


_LIBRARY.impl("transposed", _by_pytorch, "CPU")
_LIBRARY.impl("transposed", _transposed, "CUDA")
torch.library.register_fake("lospmm::transposed", lambda x: x.new_empty((x.shape[1], x.shape[0])), lib=_LIBRARY)

#: The operator's overload, so that calls skip the look-up.
transposed = torch.ops.lospmm.transposed.default
