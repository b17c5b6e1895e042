"""Tuned kernels for pruned PyTorch models; the only package that imports PyTorch (docs/pytorch.md).

report = lospmm.nn.sparsify_(model, example)     # tune and swap, in place, if that is faster
lospmm.nn.save(model, "tuned")                   # the kernels, not the weights
lospmm.nn.load_(model, "tuned")                  # in another process, without tuning

Of ``sparsify_``: ``site`` finds pruned weights, ``layout`` the transposes that they can do without, ``tuning`` and
``sources`` their kernels, ``choice`` the faster ones, by ``timing`` and ``whole``. Of a call: ``layer`` has the
modules, ``sparse`` binds their kernels to the weights, ``operator`` finds these in ``bound`` and runs them.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from lospmm.errors import extra_needed as _extra_needed

with _extra_needed("torch", "lospmm.nn"):
    import torch as _torch

from lospmm.nn.folder import load_, save
from lospmm.nn.fusion import fused
from lospmm.nn.report import ModelTimes, Report, Row
from lospmm.nn.sparse import restore_, status

if _TYPE_CHECKING:
    from lospmm.nn.sparsify import sparsify_
    from lospmm.nn.table import layers

__all__ = ["ModelTimes", "Report", "Row", "fused", "layers", "load_", "restore_", "save", "sparsify_", "status"]

#: The module of each name that is imported on first use.
_HOMES = {"layers": "lospmm.nn.table", "sparsify_": "lospmm.nn.sparsify"}

del _torch


def __getattr__(name: str) -> object:
    """Import what needs tuning on first use: a program that runs a saved model needs none."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _extra_needed("tune", f"lospmm.nn.{name}"):
        return getattr(_import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the names that are there, and those that are imported on first use."""
    return [*globals(), *_HOMES]
