"""``lospmm::transposed``: a matrix turned over through shared memory, on a GPU.

PyTorch's copy of a transposed tensor writes, or reads, a line of memory for every element. A compiled model does not
need this: there a transpose is written with what computes it.
"""

from pathlib import Path

import torch
from torch import Tensor

from lospmm import gpu
from lospmm.codegen.emission import Emission
from lospmm.errors import LospmmError
from lospmm.gpu.launcher import Launcher
from lospmm.model import Launch
from lospmm.nn.operator import LIBRARY
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel

ENTRY = "lospmm_transpose"

#: As the kernel is written, and so many blocks for each SM.
_THREADS, _BLOCKS, _REGISTERS = 256, 6, 40

#: Bytes; of four floats.
_ALIGNMENT = 16

#: By the GPU; None where there is no compiler, and PyTorch's copy is taken.
_LAUNCHERS: dict[int, Launcher | None] = {}

LIBRARY.define("transposed(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def prepare(device: torch.device) -> None:
    """Have the kernel loaded on a GPU; it is compiled once and kept in the store."""
    if device.index in _LAUNCHERS:
        return
    try:
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        blocks = _BLOCKS * torch.cuda.get_device_properties(device).multi_processor_count
        with torch.cuda.device(device):
            _LAUNCHERS[device.index] = Launcher(compiled(arch), ENTRY, Launch((blocks, 1, 1), _THREADS))
    except LospmmError:
        _LAUNCHERS[device.index] = None


def compiled(arch: str) -> bytes:
    """The cubin, from the store after the first time. Raises Unsupported and ToolchainFault."""
    source = Path(gpu.__path__[0], "transpose.cu").read_text()
    emission = Emission(language="cuda", entry=ENTRY, source=source, units=(source,))
    store = Store(settings().cache_dir)
    return compile_kernel(emission, arch=arch, registers=_REGISTERS, store=store, workers=1).cubin


def turned(x: Tensor) -> Tensor:
    """(columns, rows) of ``x`` (rows, columns), contiguous: a view where that is so already."""
    view = x.t()
    if view.is_contiguous() or torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad):
        return view.contiguous()
    return transposed(x)


def turn_into(x: Tensor, to: Tensor) -> None:
    """``x`` (rows, columns) into ``to`` (columns, rows), contiguous; not for what is compiled or differentiated."""
    if not _is_launched(x, to):
        to.copy_(x.t())


def _transposed(x: Tensor) -> Tensor:
    to = torch.empty((x.shape[1], x.shape[0]), dtype=x.dtype, device=x.device)
    return to if _is_launched(x, to) else _by_pytorch(x)


def _is_launched(x: Tensor, to: Tensor) -> bool:
    """Whether the kernel does it, on the current stream. Never on a CPU."""
    launcher = _LAUNCHERS.get(x.get_device())
    usable = launcher is not None and x.dtype is torch.float32 and x.is_contiguous() and x.numel() > 0
    if launcher is None or not usable or torch._C._cuda_getDevice() != x.get_device():
        return False
    given, found = x.data_ptr(), to.data_ptr()
    if (given | found) % _ALIGNMENT:
        return False
    rows, columns = x.shape
    stream = torch._C._cuda_getCurrentRawStream(x.get_device())
    return launcher(stream, given, found, rows | columns << 32)


def _by_pytorch(x: Tensor) -> Tensor:
    return x.t().clone(memory_format=torch.contiguous_format)


LIBRARY.impl("transposed", _by_pytorch, "CPU")
LIBRARY.impl("transposed", _transposed, "CUDA")
torch.library.register_fake("lospmm::transposed", lambda x: x.new_empty((x.shape[1], x.shape[0])), lib=LIBRARY)

#: The operator, without the look-up of its overload.
transposed = torch.ops.lospmm.transposed.default
