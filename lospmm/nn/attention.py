"""Attention between its projections, and PyTorch's fast path, which would bypass their kernels.

In inference PyTorch runs whole encoder layers in fused code that reads the dense weights. Layers with tuned projections
are marked as not eligible for it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lospmm.nn.place import is_dense

#: Class, attribute that PyTorch checks before the fast path, and the value that rules the fast path out.
_FAST_PATHS = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)


def why_dense(module: nn.MultiheadAttention) -> str | None:
    """Return why PyTorch has to run all of an attention, without its projections' kernels, or None."""
    if not module._qkv_same_embed_dim:
        return "its keys and values have sizes of their own"
    if module.bias_k is not None or module.add_zero_attn:
        return f"its attention has {'add_bias_kv' if module.bias_k is not None else 'add_zero_attn'}, and kernels none"
    return None


def is_batch(
    module: nn.MultiheadAttention,
    inputs: tuple[Tensor, Tensor, Tensor],
    masks: tuple[Tensor | None, Tensor | None],
) -> bool:
    """Return whether inputs and masks have the shapes and types of a batch.

    ``inputs`` are query, key and value, ``masks`` the padding and the attention mask. PyTorch's own forward says what
    is wrong with others.
    """
    query, key, value = inputs
    batch, tokens = (0, 1) if module.batch_first else (1, 0)
    if any(one.dim() != 3 or not is_dense(one) for one in inputs):
        return False
    if key.shape != value.shape or key.shape[batch] != query.shape[batch]:
        return False
    scores = (query.shape[tokens], key.shape[tokens])
    shapes = ([(key.shape[batch], scores[1])], [scores, (query.shape[batch] * module.num_heads, *scores)])
    return all(
        mask is None or (mask.dtype in (torch.bool, query.dtype) and tuple(mask.shape) in taken)
        for mask, taken in zip(masks, shapes, strict=True)
    )


def attended(
    module: nn.MultiheadAttention,
    projected: tuple[Tensor, ...],
    masks: tuple[Tensor | None, Tensor | None],
    *,
    weighs: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the input of ``out_proj``, and with ``weighs`` the attention weights of each head.

    ``projected`` are q, k and v, ``masks`` the padding and the attention mask; ``is_causal`` says that the latter is
    causal.
    """
    q, k, v = (_heads(module, one) for one in projected)
    padding, attention = masks
    mask = _mask(q, k, padding, attention)
    weights = None
    if weighs:
        scores = q @ k.transpose(-2, -1) / math.sqrt(module.head_dim)
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        found = weights @ v
    else:
        hint = is_causal and padding is None
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=None if hint else mask, is_causal=hint)
    return found.permute((0, 2, 1, 3) if module.batch_first else (2, 0, 1, 3)).flatten(2), weights


def _heads(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """Return (batch, heads, tokens, features of a head)."""
    order = (0, 2, 1, 3) if module.batch_first else (1, 2, 0, 3)
    return x.unflatten(-1, (module.num_heads, module.head_dim)).permute(order)


def _mask(q: Tensor, k: Tensor, padding: Tensor | None, attention: Tensor | None) -> Tensor | None:
    """Return both masks as a sum to add to the scores; True, or minus infinity, excludes."""
    found = None
    if attention is not None:
        found = _as_numbers(attention, q.dtype)
        if found.dim() == 3:
            found = found.view(q.shape[0], q.shape[1], *found.shape[1:])
    if padding is not None:
        padded = _as_numbers(padding, q.dtype).view(q.shape[0], 1, 1, k.shape[2])
        found = padded if found is None else found + padded
    return found


def _as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def close_fast_paths(model: nn.Module) -> None:
    """Keep encoder layers with tuned projections off PyTorch's fast path."""
    for module in model.modules():
        for kind, attribute, no in _FAST_PATHS:
            if isinstance(module, kind) and any("lospmm_state" in vars(part) for part in module.modules()):
                kept: dict[str, Any] = module.__dict__.setdefault("lospmm_fast_paths", {})
                kept.setdefault(attribute, module.__dict__.get(attribute))
                module.__dict__[attribute] = no


def open_fast_paths(model: nn.Module) -> None:
    """Undo ``close_fast_paths``."""
    for module in model.modules():
        module.__dict__.update(module.__dict__.pop("lospmm_fast_paths", {}))


@contextmanager
def no_fast_path() -> Iterator[None]:
    """Turn PyTorch's fast path off, so that modules call their parts, whose hooks then see every input."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
