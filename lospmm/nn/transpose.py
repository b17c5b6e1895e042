"""``lospmm::transposed``: a matrix of 16 or 32 bits turned over through shared memory, on a GPU.

PyTorch's copy of a transposed tensor writes, or reads, a line of memory for every element. A compiled model does not
need this: there a transpose is written with what computes it.
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
from lospmm.nn.operator import LIBRARY
from lospmm.problem.problem import Launch
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel

#: The kernel for elements of so many bytes.
ENTRIES: Mapping[int, str] = MappingProxyType({4: "lospmm_transpose", 2: "lospmm_transpose_16"})

#: As the kernel is written, and so many blocks for each SM.
_THREADS, _BLOCKS, _REGISTERS = 256, 6, 40

#: Bytes; of four floats.
_ALIGNMENT = 16

#: Of what is turned over by a kernel.
_TYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

#: By the GPU, and by the bytes of an element; empty where there is no compiler, and PyTorch's copy is taken.
_LAUNCHERS: dict[int, Mapping[int, Launcher]] = {}

LIBRARY.define("transposed(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def prepare(device: torch.device) -> None:
    """Have the kernels loaded on a GPU; they are compiled once and kept in the store."""
    if device.index in _LAUNCHERS:
        return
    try:
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        blocks = _BLOCKS * torch.cuda.get_device_properties(device).multi_processor_count
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # which gives the process, and this thread, a context
            cubin, launch = compiled(arch), Launch((blocks, 1, 1), _THREADS)
            _LAUNCHERS[device.index] = {size: Launcher(cubin, entry, launch) for size, entry in ENTRIES.items()}
    except LospmmError:
        _LAUNCHERS[device.index] = {}


def compiled(arch: str) -> bytes:
    """The cubin, from the store after the first time. Raises Unsupported and ToolchainFault."""
    source = Path(gpu.__path__[0], "transpose.cu").read_text()
    emission = Emission(language="cuda", entry=ENTRIES[4], source=source, units=(source,))
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


LIBRARY.impl("transposed", _by_pytorch, "CPU")
LIBRARY.impl("transposed", _transposed, "CUDA")
torch.library.register_fake("lospmm::transposed", lambda x: x.new_empty((x.shape[1], x.shape[0])), lib=LIBRARY)

#: The operator, without the look-up of its overload.
transposed = torch.ops.lospmm.transposed.default
