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
from lospmm.codegen.emission import Emission
from lospmm.errors import LospmmError
from lospmm.gpu.launcher import Launcher
from lospmm.problem.problem import Launch
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel

#: Entry of the kernel for each element size in bytes.
ENTRIES: Mapping[int, str] = MappingProxyType({4: "lospmm_transpose", 2: "lospmm_transpose_16"})

#: Threads of a block (as in transpose.cu), blocks for each SM, registers of a thread.
_THREADS, _BLOCKS, _REGISTERS = 256, 6, 40

#: Alignment of both matrices in bytes: the kernel loads four floats at a time.
_ALIGNMENT = 16

#: Element types that the kernels take.
_TYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

#: Loaded kernels by GPU and element size; empty for a GPU without a compiler, where PyTorch's copy runs.
_LAUNCHERS: dict[int, Mapping[int, Launcher]] = {}

_LIBRARY = torch.library.Library("lospmm", "FRAGMENT")
_LIBRARY.define("transposed(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def prepare(device: torch.device) -> None:
    """Load the kernels on a GPU; the store keeps them compiled."""
    if device.index in _LAUNCHERS:
        return
    try:
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        blocks = _BLOCKS * torch.cuda.get_device_properties(device).multi_processor_count
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # gives the process and this thread a context
            cubin, launch = compiled(arch), Launch((blocks, 1, 1), _THREADS)
            _LAUNCHERS[device.index] = {size: Launcher(cubin, entry, launch) for size, entry in ENTRIES.items()}
    except LospmmError:
        _LAUNCHERS[device.index] = {}


def compiled(arch: str) -> bytes:
    """Compile the kernels, or take the cubin from the store; raises Unsupported and ToolchainFault."""
    source = Path(gpu.__path__[0], "transpose.cu").read_text()
    emission = Emission(language="cuda", entry=ENTRIES[4], source=source, units=(source,))
    store = Store(settings().cache_dir)
    return compile_kernel(emission, arch=arch, registers=_REGISTERS, store=store, workers=1).cubin


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
