"""Where in a module a pruned weight lies: as it is, or as an original and a mask.

``torch.nn.utils.prune`` and parametrizations compute the pruned weight anew for every call. A kernel has no need of
that: the original and the mask say all.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod

from lospmm.errors import Unsupported
from lospmm.nn.bound import Tensors

#: The buffer that holds the mask of a weight whose parametrization was found to be one. It is not in the state_dict.
MASK_BUFFER = "lospmm_{}_mask"


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """Attributes that lead to each tensor; no mask and no bias are empty."""

    weight: tuple[str, ...]
    mask: tuple[str, ...] = ()
    bias: tuple[str, ...] = ()


def tensors_of(module: nn.Module, place: WeightPlace) -> Tensors:
    """The tensors as they are now."""
    return Tensors(
        _at(module, place.weight),
        _at(module, place.mask) if place.mask else None,
        _at(module, place.bias) if place.bias else None,
        module.groups if isinstance(module, nn.Conv1d | nn.Conv2d) else 1,
    )


def _at(module: nn.Module, path: tuple[str, ...]) -> Tensor:
    found: Any = module
    for name in path:
        found = getattr(found, name)
    return found


def place_of(module: nn.Module, name: str, bias: str) -> WeightPlace:
    """Where the weight ``name`` and the bias that goes with it lie. Raises Unsupported.

    The mask of a parametrization becomes a buffer of the module, so that it moves along.
    """
    if f"{bias}_orig" in module._parameters or _is_parametrized(module, bias):
        raise Unsupported(f"its {bias} is pruned or parametrized too; make that permanent first")
    at_bias = (bias,) if getattr(module, bias, None) is not None else ()
    if _is_parametrized(module, name):
        return WeightPlace(("parametrizations", name, "original"), _mask_of(module, name), at_bias)
    hooks = module._forward_pre_hooks.values()
    if f"{name}_orig" in module._parameters and any(_prunes(hook, name) for hook in hooks):
        return WeightPlace((f"{name}_orig",), (f"{name}_mask",), at_bias)
    if module._parameters.get(name) is None:
        raise Unsupported(f"its {name} is not a parameter; make what computes it permanent first")
    return WeightPlace((name,), (), at_bias)


def _is_parametrized(module: nn.Module, name: str) -> bool:
    return parametrize.is_parametrized(module, name)


def _mask_of(module: nn.Module, name: str) -> tuple[str, ...]:
    """Where the mask is that a parametrization comes to. Raises Unsupported where it is more than a mask.

    It is the parametrization's own, where it has one, so that it may be changed there; else a buffer of the module.
    """
    parametrization = module.parametrizations[name]
    mask = _fixed_mask(parametrization)
    if mask is None:
        raise Unsupported(
            "its parametrization is more than a mask that is always the same; call "
            "torch.nn.utils.parametrize.remove_parametrizations first"
        )
    for own, tensor in parametrization.named_buffers():
        if tensor.shape == mask.shape and torch.equal(tensor, mask.to(tensor.dtype)) and _is_read(parametrization, own):
            return ("parametrizations", name, *own.split("."))
    buffer = MASK_BUFFER.format(name)
    module.register_buffer(buffer, mask, persistent=False)
    return (buffer,)


def _fixed_mask(parametrization: Any) -> Tensor | None:
    """What a parametrization multiplies every weight with, if it does no more than that.

    It is asked for the mask with ones, and then has to do with other weights, its own among them, as the mask does: one
    that depends on the weight or on chance does not. A copy is asked: some keep what they computed.
    """
    original = getattr(parametrization, "original", None)  # of weight_norm there are two
    if not isinstance(original, Tensor) or original.is_meta or not original.is_floating_point():
        return None
    generator = torch.Generator(original.device).manual_seed(0)
    drawn = torch.randn(original.shape, generator=generator, device=original.device).to(original.dtype)
    weights = (original, -original, original.flatten().flip(0).view_as(original), drawn, 1000 * drawn)
    try:
        with torch.no_grad():
            parts = [copy.deepcopy(part) for part in parametrization]
            mask = _through(parts, torch.ones_like(original)) != 0
            is_mask = all(torch.equal(_through(parts, one.detach().clone()), one * mask) for one in weights)
    except Exception:  # whatever a parametrization of the model's own does
        return None
    return mask if is_mask else None


def _is_read(parametrization: Any, buffer: str) -> bool:
    """Whether this buffer is the mask: without any of its ones, nothing is left."""
    parts = copy.deepcopy(list(parametrization))
    at, *path = buffer.split(".")
    with torch.no_grad():
        _at(parts[int(at)], tuple(path)).zero_()
        return not bool(_through(parts, torch.ones_like(parametrization.original)).any())


def _through(parts: Sequence[Any], weight: Tensor) -> Tensor:
    for part in parts:
        weight = part(weight)
    return weight


def take_hooks(module: nn.Module, name: str) -> dict[int, object]:
    """Remove the hooks of ``torch.nn.utils.prune`` that compute this weight, and return them by their number."""
    hooks = {number: hook for number, hook in module._forward_pre_hooks.items() if _prunes(hook, name)}
    for number in hooks:
        del module._forward_pre_hooks[number]
    return dict(hooks)


def _prunes(hook: object, name: str) -> bool:
    return isinstance(hook, BasePruningMethod) and bool(hook._tensor_name == name)


def forget_mask(module: nn.Module, name: str) -> None:
    """Remove the buffer that ``place_of`` made."""
    module._buffers.pop(MASK_BUFFER.format(name), None)
    module._non_persistent_buffers_set.discard(MASK_BUFFER.format(name))
