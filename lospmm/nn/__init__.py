"""Pruned PyTorch models on tuned kernels: the only part that imports PyTorch (docs/pytorch.md).

report = lospmm.nn.sparsify_(model, example)     # tune and swap, in place, where that is faster
lospmm.nn.save(model, "tuned")                   # the kernels, not the weights
lospmm.nn.load_(model, "tuned")                  # in another process, without tuning

``operator`` is what a kernel is to PyTorch, ``bound`` finds it by its weight, ``layer`` and ``attention`` are the
modules that call it, ``site``, ``layout``, ``tuning``, ``timing`` and ``choice`` are the steps of ``sparsify``,
``calling`` is how the model will be called, ``whole`` and ``turns`` time it so; ``fusion`` makes one module of a layer
and what follows it.
"""

try:
    import torch as _torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "lospmm.nn needs PyTorch 2.6 or newer: pip install 'lospmm[torch]'", name="torch"
    ) from None

from lospmm.nn.folder import load_, save
from lospmm.nn.fusion import fused
from lospmm.nn.report import ModelTimes, Report, Row
from lospmm.nn.sparsify import restore_, sparsify_, status

__all__ = ["ModelTimes", "Report", "Row", "fused", "load_", "restore_", "save", "sparsify_", "status"]

del _torch
