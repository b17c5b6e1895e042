"""Operator ``lospmm::transposed``: transposes 16- or 32-bit matrices through shared memory.

PyTorch's copy of a transposed tensor touches one line of memory for every element. Compiled models do not need this:
torch.compile fuses a transpose with what computes its input.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lospmm import gpu
from lospmm.errors import GpuFault
from lospmm.gpu.launcher import Launcher
from lospmm.problem.launch import Launch

#: Entries of the kernels for elements of 32 and of 16 bits.
ENTRIES = "lospmm_transpose", "lospmm_transpose_16"

#: Machine code for the GPUs of the device table, and PTX for later ones; from transpose.cu, by ``make golden``.
CODE = Path(gpu.__path__[0], "transpose.fatbin")

#: Threads of a block (as in transpose.cu), blocks for each SM.
_THREADS, _BLOCKS = 256, 6

#: Alignment of both matrices in bytes: the kernel loads four floats at a time.
_ALIGNMENT = 16

#: Loaded kernels by GPU and element type; empty for a GPU that CODE is not for, where PyTorch's copy runs.
_LAUNCHERS: dict[int, Mapping[torch.dtype, Launcher]] = {}

#: The first layer with a common input transposes it and keeps the transpose with the tensor; the last removes it.
Shares: TypeAlias = Literal["no", "first", "next", "last"]

#: The attribute of a tensor that holds it transposed.
_TRANSPOSED = "lospmm_transposed"

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
            whole = Launcher(code, ENTRIES[0], launch)
            half = whole.beside(ENTRIES[1], launch)
            _LAUNCHERS[device.index] = {torch.float32: whole, torch.float16: half, torch.bfloat16: half}
    except GpuFault:
        _LAUNCHERS[device.index] = {}


def turned(x: Tensor) -> Tensor:
    """Return ``x`` (rows, columns) as a contiguous (columns, rows): a view if its transpose is contiguous."""
    view = x.t()
    if view.is_contiguous() or torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad):
        return view.contiguous()
    return transposed(x)


def tokens_turned(x: Tensor) -> Tensor:
    """Return ``x`` (..., k) as a contiguous (k, n)."""
    return turned(x.reshape(-1, x.shape[-1]))


def turned_once(x: Tensor, shares: Shares, turn: Callable[[Tensor], Tensor] = tokens_turned) -> Tensor:
    """Return ``turn`` of ``x``, computed once for the layers that take ``x`` one after the other.

    The first of these never reuses a kept transpose: replays of a CUDA graph, for one, write to ``x`` without a change
    of its version counter. Tensors of inference mode have no counter and are transposed each time.
    """
    if shares == "no" or x.is_inference():
        return turn(x)
    kept = x.__dict__.pop(_TRANSPOSED, None)
    if kept is None or shares == "first" or kept[0] != x._version:
        kept = x._version, turn(x)
    if shares != "last" and kept[1].data_ptr() != x.data_ptr():  # a view of x itself is not kept
        x.__dict__[_TRANSPOSED] = kept
    return kept[1]


def turn_into(x: Tensor, to: Tensor) -> None:
    """Write ``x`` (..., columns) to contiguous ``to``, in memory (columns, rows), outside compile and autograd."""
    if not _is_launched(x, to):
        columns = x.shape[-1]
        to.view(columns, -1).copy_(x.reshape(-1, columns).t())


def _transposed(x: Tensor) -> Tensor:
    to = torch.empty((x.shape[1], x.shape[0]), dtype=x.dtype, device=x.device)
    return to if _is_launched(x, to) else _by_pytorch(x)


def _is_launched(x: Tensor, to: Tensor) -> bool:
    """Launch the kernel on the current stream; return whether it could be."""
    device = x.get_device()
    launcher = _LAUNCHERS.get(device, {}).get(x.dtype)
    if launcher is None or not x.is_contiguous() or torch._C._cuda_getDevice() != device:
        return False
    given, found, columns = x.data_ptr(), to.data_ptr(), x.shape[-1]
    if (given | found) % _ALIGNMENT or not (rows := x.numel() // (columns or 1)):
        return False
    return launcher(torch._C._cuda_getCurrentRawStream(device), given, found, rows | columns << 32)


def _by_pytorch(x: Tensor) -> Tensor:
    return x.t().clone(memory_format=torch.contiguous_format)


_LIBRARY.impl("transposed", _by_pytorch, "CPU")
_LIBRARY.impl("transposed", _transposed, "CUDA")
torch.library.register_fake("lospmm::transposed", lambda x: x.new_empty((x.shape[1], x.shape[0])), lib=_LIBRARY)

#: The operator's overload, so that calls skip the look-up.
transposed = torch.ops.lospmm.transposed.default
