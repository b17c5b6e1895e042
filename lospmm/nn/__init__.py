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

__all__ = ["ModelTimes", "Report", "Row", "fused", "load_", "restore_", "save", "sparsify_", "status"]

del _torch


def __getattr__(name: str) -> object:
    """Import ``sparsify_``, and tuning with it, on first use: a program that runs a saved model needs none."""
    if name != "sparsify_":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _extra_needed("tune", "lospmm.nn.sparsify_"):
        return _import_module("lospmm.nn.sparsify").sparsify_
