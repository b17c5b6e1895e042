"""Auto-tuned, fully unrolled SpMM kernels for pruned neural networks, after LO-SpMM (TACO 2024).

kernel = lospmm.tune(weights, n=360, device="h200")
kernel.save("kernels/fc1")
c = lospmm.load("kernels/fc1").run_on_cpu(b)
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from lospmm.errors import extra_needed
from lospmm.version import __version__

if TYPE_CHECKING:
    from lospmm.einsums import EinsumKernel, einsum, einsum_kernel
    from lospmm.kernel import Kernel, join, load, load_model, tune
    from lospmm.matrix.csr import SparseMatrix
    from lospmm.problem.convolution import Convolution

__all__ = [
    "Convolution",
    "EinsumKernel",
    "Kernel",
    "SparseMatrix",
    "__version__",
    "einsum",
    "einsum_kernel",
    "join",
    "load",
    "load_model",
    "tune",
]

#: The module of each public name.
_HOMES = MappingProxyType(
    {
        **dict.fromkeys(("Kernel", "join", "load", "load_model", "tune"), "lospmm.kernel"),
        **dict.fromkeys(("EinsumKernel", "einsum", "einsum_kernel"), "lospmm.einsums"),
        "Convolution": "lospmm.problem.convolution",
        "SparseMatrix": "lospmm.matrix.csr",
    }
)


def __getattr__(name: str) -> object:
    """Import a public name on first use, since every module below them imports this package too."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extra_needed("tune", f"lospmm.{name}"):
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the names that are there, and those that are imported on first use."""
    return [*globals(), *_HOMES]
