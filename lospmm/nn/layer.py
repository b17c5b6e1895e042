"""Layers whose products are tuned kernels: linear layers, convolutions and attention.

Calls that no kernel serves run dense, as before.

**Layout.** A kernel reads B features first (K x N); a Linear's activations are tokens x features. ``forward``
transposes its input and its result. Elementwise operations keep the strides of a tensor, so that no transpose is needed
between two layers with nothing but such operations between them, of which the first is ``features_first``: what
``channels_last`` is to convolutions. No result depends on it.

**More columns than any kernel's N** run in pieces. A transpose copies its input anyway, so that a piece of tokens
becomes a B of a kernel's own N: the kernel is as fast as for its N, and needs no N at run time.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from lospmm.nn import direct, operator, package
from lospmm.nn.attention import attended, close_fast_paths, is_batch, why_dense
from lospmm.nn.bound import Tensors, serves_images
from lospmm.nn.fusion import FusedConv2d, FusedLinear
from lospmm.nn.place import as_images, is_dense, tensors_of, way_of
from lospmm.nn.sparse import Sparse, Tuned, swap
from lospmm.nn.transpose import tokens_turned, turn_into, turned, turned_once

#: What a layer computes of an input, a weight, a mask, a bias, and a residual if it adds one.
Operation: TypeAlias = Callable[..., Tensor]


def product(x: Tensor, tuned: Tuned, tensors: Tensors, *, relu: bool = False) -> Tensor:
    """Return (..., m) for ``x`` (..., k): the operator's product and the transposes that it needs."""
    n = x.numel() // x.shape[-1]
    if n > tuned.sizes[-1][1]:
        y = _in_pieces(x.reshape(n, x.shape[-1]), tuned, tensors, relu=relu)
        return _as_given(y, x)
    b = tokens_turned(x) if torch.compiler.is_compiling() else turned_once(x, tuned.shares)
    if (c := _exported(b, tuned, relu=relu)) is None:
        c = operator.spmm(b, tensors.weight, tensors.mask, tensors.bias, None, relu)
    c = c.t() if tuned.features_first else turned(c)
    return _as_given(c, x)


def multiplied(module: nn.Module, x: Tensor, tuned: Tuned, *, relu: bool = False) -> Tensor | None:
    """Return ``product`` with the weight of ``module`` where kernels serve ``x``, or None."""
    if not torch.compiler.is_dynamo_compiling() and (y := direct.linear(x, tuned, relu=relu)) is not None:
        return y
    return product(x, tuned, tensors_of(module, tuned.place), relu=relu) if serves(tuned, x) else None


def _exported(
    x: Tensor, tuned: Tuned, way: tuple[int, ...] = (), residual: Tensor | None = None, *, relu: bool
) -> Tensor | None:
    """Return C by the operator of C++ where a model is exported and a kernel is for just these operands, or None.

    torch.compile fuses transposes with what is next to them, and its graphs are shared by layers.
    """
    if torch.compiler.is_dynamo_compiling() or not torch.compiler.is_compiling():
        return None
    bound = tuned.bound
    if bound is None or torch.is_grad_enabled():
        return None
    ready = bound.ready.get((tuple(x.shape), relu, residual is not None, way))
    if ready is None or (own := ready.package) is None or not bound.is_current():
        return None
    if any(one.dtype is not ready.dtype or one.device != ready.device for one in (x, residual) if one is not None):
        return None
    if residual is not None and residual.shape != ready.out_shape:
        return None
    c: Tensor = package.apply(x, own.data, own.high, own.low, ready.out_shape, residual)
    return c


def _as_given(c: Tensor, x: Tensor) -> Tensor:
    """Return (n, m) as (..., m), shaped like ``x`` (..., k)."""
    if x.dim() == 2:
        return c
    return c.squeeze(0) if x.dim() == 1 else c.unflatten(0, x.shape[:-1])


def pieces(sizes: tuple[tuple[int, int], ...], n: int) -> tuple[tuple[int, int], ...]:
    """Return (first, end) of the pieces of ``n`` columns that kernels compute.

    ``sizes`` are as in ``Tuned``. As many pieces of the largest N as fit, and the rest if it fills a kernel enough;
    else the rest is left out, as the dense layer is faster for it.
    """
    if not sizes or n < 1:
        return ()
    most = sizes[-1][1]
    whole = n // most  # torch.compile makes a graph for each number of pieces, not for each n
    found = [(at * most, (at + 1) * most) for at in range(whole)]
    rest = n - whole * most
    if any(least <= rest <= size for least, size in reversed(sizes)):
        found.append((whole * most, n))
    return tuple(found)


def _in_pieces(x: Tensor, tuned: Tuned, tensors: Tensors, *, relu: bool) -> Tensor:
    """Return (n, m) for ``x`` (n, k), piece by piece; compiled, joining the pieces also transposes them."""
    ends = pieces(tuned.sizes, x.shape[0])
    dense = x[ends[-1][1] :]
    with _unlowered(x, tuned):
        rest = [_dense(dense, tensors, relu=relu)] if len(dense) else []

    def part(first: int, end: int) -> Tensor:
        return operator.spmm(turned(x[first:end]), tensors.weight, tensors.mask, tensors.bias, None, relu)

    if tuned.features_first:
        return torch.cat([*(part(*piece) for piece in ends), *(one.t() for one in rest)], dim=1).t()
    if torch.compiler.is_compiling():
        return torch.cat([*(part(*piece).t() for piece in ends), *rest])
    y = x.new_empty((x.shape[0], tensors.weight.shape[0]))
    for first, end in ends:
        if direct.linear(x[first:end], tuned, relu=relu, to=y[first:end]) is None:
            turn_into(part(first, end), y[first:end])
    if rest:
        y[ends[-1][1] :] = rest[0]
    return y


def _is_taken(x: Tensor, tuned: Tuned) -> bool:
    return x.dtype is tuned.dtype and is_dense(x)


def _unlowered(x: Tensor, tuned: Tuned) -> AbstractContextManager[Any]:
    """Turn autocast off for dense calls of a layer with kernels for ``x``'s type.

    Otherwise the type of a result, or of a part of it, would depend on the number of columns.
    """
    if (tuned.sizes or tuned.inputs) and _is_taken(x, tuned) and torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


def serves(tuned: Tuned, x: Tensor) -> bool:
    """Return whether kernels serve ``x``, by its shape and type alone: torch.compile decides it once."""
    if not _is_taken(x, tuned) or x.dim() < 1 or x.shape[-1] == 0:
        return False
    columns = x.numel() // x.shape[-1]
    if tuned.dense_beyond and tuned.sizes and columns > tuned.sizes[-1][1]:
        return False
    return len(pieces(tuned.sizes, columns)) > 0


class SparseLinear(Sparse, nn.Linear):
    """Linear layer with its bias in the kernel."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute what ``nn.Linear`` does."""
        return self._multiplied(input, relu=False)

    def operation(self) -> Operation:
        """Return the layer as a function of its input and its tensors."""
        return _operation(self.lospmm_tuned, relu=isinstance(self, FusedLinear))

    def _multiplied(self, x: Tensor, *, relu: bool) -> Tensor:
        tuned = self.lospmm_tuned
        if (y := multiplied(self, x, tuned, relu=relu)) is not None:
            return y
        with _unlowered(x, tuned):
            return _dense(x, tensors_of(self, tuned.place), relu=relu)


class SparseFusedLinear(SparseLinear, FusedLinear):
    """Linear layer with the ReLU behind it in one kernel."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute what ``FusedLinear`` does."""
        return self._multiplied(input, relu=True)


class _SparseConvolution(Sparse):
    """Base of convolutions of one and of two dimensions."""

    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    padding_mode: str
    lospmm_tuned: Any

    def forward(self, input: Tensor) -> Tensor:
        """Compute what the dense convolution does."""
        return self._convolved(input, None, relu=False)

    def operation(self) -> Operation:
        """Return the layer as a function of its input, its tensors and a residual."""
        relu, way = isinstance(self, FusedConv2d) and self.relu, way_of(self)
        assert way is not None

        def convolved(
            x: Tensor, weight: Tensor, mask: Tensor | None, bias: Tensor | None, residual: Tensor | None = None
        ) -> Tensor:
            images = [one if one is None else as_images(one, one.dim()) for one in (x, weight, mask)]
            return operator.conv2d(*images, bias, residual, relu, *way)

        return convolved

    def _convolved(self, x: Tensor, residual: Tensor | None, *, relu: bool) -> Tensor:
        y = None if torch.compiler.is_dynamo_compiling() else direct.convolution(x, residual, self, relu=relu)
        if y is not None:
            return y
        tuned = self.lospmm_tuned
        tensors = tensors_of(self, tuned.place)
        weight, mask, bias = tensors.weight, tensors.mask, tensors.bias
        way = way_of(self)
        inner = as_images(x, weight.dim())
        if way is not None and inner is not None and _is_taken(x, tuned) and _has_kernel(tuned, inner.shape):
            flat = tuple(number for pair in way for number in pair)
            if (c := _exported(inner, tuned, flat, residual, relu=relu)) is None:
                images = [one if one is None else as_images(one, one.dim()) for one in (weight, mask)]
                c = operator.conv2d(inner, images[0], images[1], bias, residual, relu, *way)
            return c if weight.dim() == 4 else c.squeeze(2)
        with _unlowered(x, tuned):
            c = self._conv_forward(x, _effective(tensors), bias)
        c = c if residual is None else c + residual
        return functional.relu(c) if relu else c


class SparseConv2d(_SparseConvolution, nn.Conv2d):
    """Convolution with kernels for some image sizes and batches, and for smaller batches."""


class SparseConv1d(_SparseConvolution, nn.Conv1d):
    """Convolution of one dimension, computed on images of one row."""


class SparseFusedConv2d(_SparseConvolution, FusedConv2d):
    """Convolution with the residual and the ReLU behind it in one kernel."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute what ``FusedConv2d`` does."""
        return self._convolved(input, residual, relu=self.relu)


class SparseMultiheadAttention(Sparse, nn.MultiheadAttention):
    """Self-attention with one kernel for q, k and v together, and ``out_proj`` as a layer of its own."""

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
        """Compute what ``nn.MultiheadAttention`` does."""
        inputs, masks = (query, key, value), (key_padding_mask, attn_mask)
        is_plain = why_dense(self) is None and not (self.training and self.dropout > 0)
        is_hint = is_causal and attn_mask is None  # PyTorch refuses is_causal without the mask
        if not is_plain or is_hint or not is_batch(self, inputs, masks):
            self._mask_weights()
            return super().forward(*inputs, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        found, weights = attended(self, self._projected(*inputs), masks, weighs=need_weights, is_causal=is_causal)
        out: Tensor = self.out_proj(found)
        return out, weights.mean(dim=1) if weights is not None and average_attn_weights else weights

    def operation(self) -> Operation:
        """Return the projection of q, k and v as a function of the input and its tensors."""
        return _operation(self.lospmm_tuned["in_proj_weight"], relu=False)

    def _mask_weights(self) -> None:
        """Apply masks, as the hooks of ``torch.nn.utils.prune`` do that a swapped layer is without."""
        for module in (self, self.out_proj):
            for name, tuned in module.lospmm_state.tuned.items() if isinstance(module, Sparse) else ():
                if tuned.place.weight == (f"{name}_orig",):
                    tensors = tensors_of(module, tuned.place)
                    setattr(module, name, tensors.weight * tensors.mask)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        tuned = self.lospmm_tuned.get("in_proj_weight")
        if tuned is None:
            weight, bias = self.in_proj_weight, self.in_proj_bias
        else:
            if query is key and key is value and (y := multiplied(self, query, tuned)) is not None:
                return y.chunk(3, dim=-1)
            tensors = tensors_of(self, tuned.place)
            weight, bias = _effective(tensors).to(query.device), tensors.bias
        if query is key and key is value:
            return functional.linear(query, weight, bias).chunk(3, dim=-1)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        parts = zip((query, key, value), weight.chunk(3), biases, strict=True)
        return tuple(functional.linear(*part) for part in parts)


def _has_kernel(tuned: Tuned, shape: Sequence[int]) -> bool:
    return any(serves_images(*one, shape) for one in tuned.inputs)


def _operation(tuned: Tuned, *, relu: bool) -> Operation:
    return lambda x, weight, mask, bias: product(x, tuned, Tensors(weight, mask, bias), relu=relu)


def _dense(x: Tensor, tensors: Tensors, *, relu: bool) -> Tensor:
    y = functional.linear(x, _effective(tensors).to(x.device), tensors.bias)  # it may be in host memory
    return functional.relu(y) if relu else y


def _effective(tensors: Tensors) -> Tensor:
    return tensors.weight if tensors.mask is None else tensors.weight * tensors.mask


#: The class with kernels for each class of module; parametrized classes are added as they are met.
CLASSES: Mapping[type[nn.Module], type[Sparse]] = {
    nn.Linear: SparseLinear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: SparseLinear,
    nn.Conv1d: SparseConv1d,
    nn.Conv2d: SparseConv2d,
    FusedConv2d: SparseFusedConv2d,
    FusedLinear: SparseFusedLinear,
    nn.MultiheadAttention: SparseMultiheadAttention,
}

#: The class with kernels for each class that a parametrization made.
_PARAMETRIZED: dict[type[nn.Module], type[Sparse]] = {}


def sparse_class(original: type[nn.Module]) -> type[Sparse]:
    """Return the class with kernels for a class that ``kind_of`` names."""
    if original in CLASSES:
        return CLASSES[original]
    if original not in _PARAMETRIZED:
        sparse = CLASSES[original.__bases__[0]]
        _PARAMETRIZED[original] = type(sparse.__name__, (sparse, original), {})
    return _PARAMETRIZED[original]


def swap_in(module: nn.Module, tuned: Mapping[str, Tuned]) -> None:
    """Run a module on these kernels, given by the name of each weight."""
    original = type(module) if (state := module.__dict__.get("lospmm_state")) is None else state.original
    swap(module, tuned, sparse_class(original))


def call_parts(model: nn.Module) -> None:
    """Have attention call its ``out_proj``, and encoder layers their parts, if these have kernels."""
    for module in model.modules():
        if type(module) is nn.MultiheadAttention and isinstance(module.out_proj, Sparse):
            swap_in(module, {})
    close_fast_paths(model)
