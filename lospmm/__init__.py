"""Auto-tuned, fully unrolled SpMM kernels for pruned neural networks, after the paper LO-SpMM (TACO 2024).

kernel = lospmm.tune(weights, n=360, device="h200")
kernel.save("kernels/fc1")
c = lospmm.load("kernels/fc1").run_on_cpu(b)
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lospmm.convolution import Convolution
    from lospmm.kernel import Kernel, load, tune

__version__ = "0.1.0"

__all__ = ["Convolution", "Kernel", "__version__", "load", "tune"]


def __getattr__(name: str) -> object:
    """The public names, imported when first used: everything below them imports this package too."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lospmm import kernel

    return getattr(kernel, name)
