"""Place of a pruned weight in a module: one tensor, or an original and a mask.

``torch.nn.utils.prune`` and parametrizations recompute the pruned weight on every call. A kernel needs only the
original and the mask.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod

from lospmm.errors import Unsupported
from lospmm.nn.bound import Tensors

#: The buffer with the mask of a parametrized weight, which is not in the state_dict.
MASK_BUFFER = "lospmm_{}_mask"

#: Stride, padding and dilation, each along height and width.
Way: TypeAlias = tuple[list[int], list[int], list[int]]


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """Attribute path of each tensor in a module, empty without mask or bias."""

    weight: tuple[str, ...]
    mask: tuple[str, ...] = ()
    bias: tuple[str, ...] = ()


def tensors_of(module: nn.Module, place: WeightPlace) -> Tensors:
    """Return the current tensors of a weight."""
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
    """Find the weight ``name`` and its bias; raises Unsupported.

    The mask of a parametrization becomes a buffer of the module, so that it moves with the module.
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
    """Find the mask that a parametrization applies; raises Unsupported if it does more than mask.

    That is the parametrization's own buffer, so that the user can change it there, or else a new buffer of the module.
    """
    parametrization = module.parametrizations[name]
    mask = _fixed_mask(parametrization)
    if mask is None:
        raise Unsupported(
            "its parametrization is more than a constant mask; call "
            "torch.nn.utils.parametrize.remove_parametrizations first"
        )
    for own, tensor in parametrization.named_buffers():
        if tensor.shape == mask.shape and torch.equal(tensor, mask.to(tensor.dtype)) and _is_read(parametrization, own):
            return ("parametrizations", name, *own.split("."))
    buffer = MASK_BUFFER.format(name)
    module.register_buffer(buffer, mask, persistent=False)
    return (buffer,)


def _fixed_mask(parametrization: Any) -> Tensor | None:
    """Return the mask of a parametrization, or None if it is more than a mask.

    The mask is its result for ones. It must then equal the mask on other weights too, its own among them: a result that
    depends on the weight or on chance does not. A copy is called, since some keep what they compute.
    """
    original = getattr(parametrization, "original", None)  # weight_norm has two
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
    except Exception:  # the model's own parametrizations may raise anything
        return None
    return mask if is_mask else None


def _is_read(parametrization: Any, buffer: str) -> bool:
    """Return whether this buffer is the mask: zeroed, it leaves no weight."""
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
    """Remove and return, by number, the hooks of ``torch.nn.utils.prune`` that compute this weight."""
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


def is_dense(x: Tensor) -> bool:
    """Return whether kernels can read a tensor's memory: it is neither sparse nor nested."""
    return x.layout is torch.strided and not x.is_nested


def is_plain(x: Tensor) -> bool:
    """Return whether calls on a tensor need nothing of PyTorch's dispatcher.

    A subclass, a negation that is not yet computed, and any mode, transform or trace need it.
    """
    return (
        type(x) is Tensor
        and is_dense(x)
        and not x.is_neg()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
    )


def as_images(x: Tensor, dimensions: int) -> Tensor | None:
    """Return the input or weight of a convolution in four dimensions, or None without a batch."""
    if x.dim() != dimensions:
        return None
    return x if dimensions == 4 else x.unsqueeze(2)


def way_of(module: nn.Module) -> Way | None:
    """Return the way of a convolution in two dimensions, or None if its padding differs at both ends."""
    stride, dilation = (list(getattr(module, name)) for name in ("stride", "dilation"))
    padding: Any = module.padding
    if padding == "same":
        around = [step * (size - 1) for step, size in zip(dilation, module.kernel_size, strict=True)]
        if any(one % 2 for one in around):
            return None
        padding = [one // 2 for one in around]
    padding = [0] * len(stride) if padding == "valid" else list(padding)
    if len(stride) == 2:
        return stride, padding, dilation
    return [1, *stride], [0, *padding], [1, *dilation]
