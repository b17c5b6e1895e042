"""``layers``: the layer table of a model, for ``lospmm tune-model`` and the service."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lospmm.errors import BadRequest, LospmmError
from lospmm.matrix.limit import MIN_SPARSITY, is_few
from lospmm.model.layer_table import LayerSpec, LayerTable
from lospmm.nn.bound import dtype_of
from lospmm.nn.site import Site, convolution_of, find_sites, forget_masks, learn_shapes
from lospmm.nn.sparse import check_model
from lospmm.problem.convolution import written
from lospmm.problem.problem import check_columns

#: An input: its shape, and its type.
_INPUT = re.compile(r"([0-9]{1,9}(?:x[0-9]{1,9})*)(?::([a-z0-9]+))?")


def layers(model: nn.Module, example: Any, *, min_sparsity: float = MIN_SPARSITY) -> LayerTable:
    """Run ``example`` once, and return a row for each weight of ``model``, by its name in the state dict.

    Each row asks for the kernel that ``sparsify_`` would tune, at the most columns that the layer is called with. What
    it would leave dense is skipped, with the reason: layers with a share of zeros below ``min_sparsity``, kinds without
    kernels, and what no input reaches. ``example`` is a tensor, a tuple of arguments or a mapping of named ones. Raises
    BadRequest for what is no model.
    """
    check_model(model)
    names = {module: name for name, module in model.named_modules()}
    sites, rows = find_sites(model, min_sparsity)
    try:
        shapes = learn_shapes(model, sites, example)
        found = {_tensor(names[site.module], site.weight): _row(site, shapes[site.name]) for site in sites}
    finally:
        forget_masks(sites)
    reasons = {row.layer: row.reason for row in rows}
    table = {}
    for name, module in model.named_modules():
        for parameter, tensor in module.named_parameters(recurse=False):
            own = _tensor(name, parameter.removesuffix("_orig"))
            if own in found:
                table[own] = found[own]
            elif tensor.dim() >= 2:
                table[own] = LayerSpec(skip=_why_dense(name, own, module, reasons))
    return LayerTable(table, [row.sparsity for row in rows if row.sparsity is not None and is_few(row.reason)])


def input_of(text: str) -> Tensor:
    """Return an input as a text describes it, 32x3x224x224 or 1x128:int64: random, zeros of an integer type.

    Raises BadRequest.
    """
    match = _INPUT.fullmatch(text)
    kind = getattr(torch, (match and match[2]) or "float32", None)
    if match is None or not isinstance(kind, torch.dtype):
        raise BadRequest(f"example {text!r:.80}: write a shape and perhaps a type, as 32x3x224x224 or 1x128:int64")
    shape = tuple(map(int, match[1].split("x")))
    return torch.randn(shape).to(kind) if kind.is_floating_point else torch.zeros(shape, dtype=kind)


def _tensor(module: str, parameter: str) -> str:
    """Return the name of a tensor in the state dict, where a pruned one and its mask are one."""
    return f"{module}.{parameter}" if module else parameter


def _row(site: Site, shapes: list[tuple[int, ...]]) -> LayerSpec:
    if not shapes:
        return LayerSpec(skip="no input of the example reaches it")
    dtype = dtype_of(site.tensors.weight)
    assert dtype is not None, "find_sites takes weights of these types alone"
    own: dict[str, Any] = {"bias": site.tensors.bias is not None, "relu": site.relu, "residual": site.adds}
    if dtype.name != "float32":
        own["dtype"] = dtype.name
    try:
        if not site.is_convolution:
            check_columns(n := max(shapes)[0])
            return LayerSpec(n=n, **own)
        window = max((convolution_of(site, shape) for shape in shapes), key=lambda one: one.n)
        return LayerSpec(conv=written(window), groups=site.tensors.groups, **own)
    except LospmmError as error:
        return LayerSpec(skip=str(error))


def _why_dense(name: str, weight: str, module: nn.Module, reasons: Mapping[str, str]) -> str:
    kind = type(module).__name__
    if (why := reasons.get(name or kind) or reasons.get(weight)) is not None:
        return why
    if kind == "ParametrizationList":
        return "parametrized: call torch.nn.utils.parametrize.remove_parametrizations first"
    return f"no kernel for {kind}"
