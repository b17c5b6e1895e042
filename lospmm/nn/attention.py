"""nn.MultiheadAttention with kernels for its projections, and what of PyTorch would pass them by.

In inference PyTorch hands whole encoder layers to fused code of its own, which reads the dense weights. Layers that
hold tuned projections are told that they are not eligible.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lospmm.nn.layer import Sparse, is_dense, product, serves
from lospmm.nn.place import tensors_of

#: Attributes that PyTorch asks before it takes a short cut, by the class that has them, and what says no.
_SHORT_CUTS = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)


class SparseMultiheadAttention(Sparse, nn.MultiheadAttention):
    """Self-attention with one kernel for q, k and v together, and ``out_proj`` a layer of its own."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        is_plain = why_passed_by(self) is None and not (self.training and self.dropout > 0)
        is_hint = is_causal and attn_mask is None  # without what it is a hint of, PyTorch refuses it
        if not is_plain or is_hint or not self._takes(query, key, value, key_padding_mask, attn_mask):
            masks = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            self._mask_weights()
            return super().forward(query, key, value, *masks)
        q, k, v = (self._heads(one) for one in self._projected(query, key, value))
        mask = self._mask(q, k, key_padding_mask, attn_mask)
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            attended = weights @ v
        else:
            hint = is_causal and key_padding_mask is None
            attended = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=None if hint else mask, is_causal=hint
            )
        order = (0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)
        out: Tensor = self.out_proj(attended.permute(order).flatten(2))
        if not need_weights:
            return out, None
        return out, weights.mean(dim=1) if average_attn_weights else weights

    def _mask_weights(self) -> None:
        """What hooks of ``torch.nn.utils.prune``, which tuned layers are without, do before each call."""
        for module in (self, self.out_proj):
            for name, tuned in module.lospmm_state.tuned.items() if isinstance(module, Sparse) else ():
                if tuned.place.weight == (f"{name}_orig",):
                    tensors = tensors_of(module, tuned.place)
                    setattr(module, name, tensors.weight * tensors.mask)

    def _takes(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, attention: Tensor | None
    ) -> bool:
        """Whether the shapes and types are such as PyTorch takes for a batch; of others it says what is wrong."""
        batch, tokens = (0, 1) if self.batch_first else (1, 0)
        if any(one.dim() != 3 or not is_dense(one) for one in (query, key, value)):
            return False
        if key.shape != value.shape or key.shape[batch] != query.shape[batch]:
            return False
        scores = (query.shape[tokens], key.shape[tokens])
        shapes = (
            (padding, [(key.shape[batch], scores[1])]),
            (attention, [scores, (query.shape[batch] * self.num_heads, *scores)]),
        )
        return all(
            mask is None or (mask.dtype in (torch.bool, query.dtype) and tuple(mask.shape) in taken)
            for mask, taken in shapes
        )

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        tuned = self.lospmm_tuned.get("in_proj_weight")
        if tuned is None:
            weight, bias = self.in_proj_weight, self.in_proj_bias
        else:
            tensors = tensors_of(self, tuned.place)
            weight = tensors.weight if tensors.mask is None else tensors.weight * tensors.mask
            bias = tensors.bias
            if query is key and key is value and serves(tuned, query):
                return product(query, tuned, tensors).chunk(3, dim=-1)
        if query is key and key is value:
            return functional.linear(query, weight, bias).chunk(3, dim=-1)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        parts = zip((query, key, value), weight.chunk(3), biases, strict=True)
        return tuple(functional.linear(*part) for part in parts)

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, heads, tokens, features of a head)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).permute(
            (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)
        )

    def _mask(self, q: Tensor, k: Tensor, padding: Tensor | None, attention: Tensor | None) -> Tensor | None:
        """What is added to the scores: both masks, of which True, or minus infinity, means not to attend."""
        found = None
        if attention is not None:
            found = _as_numbers(attention, q.dtype)
            if found.dim() == 3:
                found = found.view(q.shape[0], self.num_heads, *found.shape[1:])
        if padding is not None:
            padded = _as_numbers(padding, q.dtype).view(q.shape[0], 1, 1, k.shape[2])
            found = padded if found is None else found + padded
        return found


def why_passed_by(module: nn.MultiheadAttention) -> str | None:
    """Why all of an attention is PyTorch's own, which calls no kernel of its projections; None where it is not."""
    if not module._qkv_same_embed_dim:
        return "its keys and values have sizes of their own"
    if module.bias_k is not None or module.add_zero_attn:
        return f"its attention has {'add_bias_kv' if module.bias_k is not None else 'add_zero_attn'}, and kernels none"
    return None


def _as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def close_short_cuts(model: nn.Module) -> None:
    """Have encoder layers with tuned projections call their parts."""
    for module in model.modules():
        for kind, attribute, no in _SHORT_CUTS:
            if isinstance(module, kind) and any(isinstance(part, Sparse) for part in module.modules()):
                kept: dict[str, Any] = module.__dict__.setdefault("lospmm_short_cuts", {})
                kept.setdefault(attribute, module.__dict__.get(attribute))
                module.__dict__[attribute] = no


def open_short_cuts(model: nn.Module) -> None:
    """Undo ``close_short_cuts``."""
    for module in model.modules():
        module.__dict__.update(module.__dict__.pop("lospmm_short_cuts", {}))


@contextmanager
def no_short_cuts() -> Iterator[None]:
    """Every module calls its parts, whose hooks then see what they are given."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
