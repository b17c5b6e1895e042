"""Where in a module a pruned weight lies: as it is, or as an original and a mask.

``torch.nn.utils.prune`` and parametrizations compute the pruned weight anew for every call. A kernel has no need of
that: the original and the mask say all.
"""

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
class Place:
    """Attributes that lead to each tensor; no mask and no bias are empty."""

    weight: tuple[str, ...]
    mask: tuple[str, ...] = ()
    bias: tuple[str, ...] = ()


def tensors_of(module: nn.Module, place: Place) -> Tensors:
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


def place_of(module: nn.Module, name: str, bias: str) -> Place:
    """Where the weight ``name`` and the bias that goes with it lie. Raises Unsupported.

    The mask of a parametrization becomes a buffer of the module, so that it moves along.
    """
    if f"{bias}_orig" in module._parameters or _is_parametrized(module, bias):
        raise Unsupported(f"its {bias} is pruned or parametrized too; make that permanent first")
    at_bias = (bias,) if getattr(module, bias, None) is not None else ()
    if _is_parametrized(module, name):
        return Place(("parametrizations", name, "original"), (_mask_of(module, name),), at_bias)
    if f"{name}_orig" in module._parameters:
        return Place((f"{name}_orig",), (f"{name}_mask",), at_bias)
    if module._parameters.get(name) is None:
        raise Unsupported(f"its {name} is not a parameter; make what computes it permanent first")
    return Place((name,), (), at_bias)


def _is_parametrized(module: nn.Module, name: str) -> bool:
    return parametrize.is_parametrized(module, name)


def _mask_of(module: nn.Module, name: str) -> str:
    """The buffer with the mask that a parametrization comes to. Raises Unsupported where it is more than a mask."""
    with torch.no_grad():
        effective = getattr(module, name)
        original = module.parametrizations[name].original
        mask = effective != 0
        if not isinstance(original, Tensor) or not torch.equal(original * mask, effective):
            raise Unsupported(
                "its parametrization is more than a mask; call torch.nn.utils.parametrize.remove_parametrizations first"
            )
    buffer = MASK_BUFFER.format(name)
    module.register_buffer(buffer, mask, persistent=False)
    return buffer


def take_hooks(module: nn.Module, name: str) -> dict[int, object]:
    """Remove the hooks of ``torch.nn.utils.prune`` that compute this weight, and return them by their number."""
    hooks = {
        number: hook
        for number, hook in module._forward_pre_hooks.items()
        if isinstance(hook, BasePruningMethod) and hook._tensor_name == name
    }
    for number in hooks:
        del module._forward_pre_hooks[number]
    return dict(hooks)


def forget_mask(module: nn.Module, name: str) -> None:
    """Remove the buffer that ``place_of`` made."""
    module._buffers.pop(MASK_BUFFER.format(name), None)
    module._non_persistent_buffers_set.discard(MASK_BUFFER.format(name))
