"""Calls from Python past PyTorch's dispatcher: the kernel of exactly the input's shape, remembered by that shape.

An operator of Python costs more than many kernels take. Calls that need more than memory and a stream take the
operators: those with gradients, in a mode or a transform of PyTorch, of a subclass of Tensor, or of other columns.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lospmm.nn.bound import BoundKernels, ReadyKernel
from lospmm.nn.operator import aligned
from lospmm.nn.place import WeightPlace, as_images, is_plain, way_of
from lospmm.nn.transpose import tokens_turned, turn_into, turned_once

#: Shape and stride of a tensor.
Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class DirectCall:
    """A kernel for inputs of one shape, and shapes and strides of its operands as tensors."""

    ready: ReadyKernel
    b_stride: tuple[int, ...] | None  # of an input that is B, or part of it; None if a contiguous one is B
    c: Layout
    turned: Layout | None = None  # of the result, where C is transposed into it, or it is part of C
    of_tokens: "DirectCall | None" = None  # of a contiguous input, where a kernel reads that as it is
    tokens: int = 0  # that the kernel reads, where they are more than the input's
    way: tuple[Any, ...] = ()  # stride, padding and dilation of a convolution


@dataclass(frozen=True, slots=True, eq=False)
class DirectCalls:
    """Direct calls of a weight. ``owned`` are (attributes of the module, name, address) of its tensors."""

    bound: BoundKernels
    owned: tuple[tuple[dict[str, Any], str, int], ...]
    device: torch.device
    dtype: torch.dtype
    known: dict[Hashable, DirectCall] = field(default_factory=dict)

    def serve(self, x: Tensor) -> bool:
        """Return whether kernels may read ``x``, and are those of the module's tensors."""
        if torch.is_grad_enabled() or not self.take(x):
            return False
        for attributes, name, address in self.owned:
            one = attributes.get(name)
            if one is None or one.data_ptr() != address:
                return False
        return self.bound.is_current()

    def take(self, x: Tensor) -> bool:
        """Return whether kernels may read ``x``."""
        return is_plain(x) and x.dtype is self.dtype and x.device == self.device

    def kernel(self, *call: Any) -> ReadyKernel | None:
        """Return the kernel for a ``bound.Call`` if it computes all of it."""
        ready = self.bound.ready.get(call)
        return ready if ready is not None and ready.fuses else None


def direct_calls(module: nn.Module, place: WeightPlace, bound: BoundKernels) -> DirectCalls | None:
    """Return the direct calls of a bound weight, or None if a parametrization has its tensors."""
    paths = [path for path in (place.weight, place.mask, place.bias) if path]
    if any(len(path) > 1 for path in paths):
        return None
    names = [path[0] for path in paths]
    attributes = [module._buffers if name in module._buffers else module._parameters for name in names]
    owned = tuple(zip(attributes, names, filter(None, bound.pointers), strict=True))
    ready = next(iter(bound.ready.values()))
    return DirectCalls(bound, owned, ready.device, ready.dtype)


def linear(x: Tensor, tuned: Any, *, relu: bool, to: Tensor | None = None) -> Tensor | None:
    """Return (..., m) for ``x`` (..., k) by the kernel of just these columns, or None.

    ``to`` is a contiguous tensor for it: rows of a result that several kernels compute.
    """
    calls: DirectCalls | None = tuned.direct
    if calls is None or type(x) is not Tensor or x.is_nested:
        return None
    call = calls.known.get(x.shape) or _learn_linear(calls, x.shape, tuned, relu=relu)
    if call is None or not calls.serve(x):
        return None
    if call.tokens:
        wide = x.new_empty(call.tokens * x.shape[-1])  # the rest may be anything
        assert call.b_stride is not None and call.turned is not None
        wide.as_strided(x.shape, call.b_stride).copy_(x)
        y = call.ready(wide, None, call.c).as_strided(*call.turned)
        return y if to is None else to.copy_(y)
    if call.of_tokens is not None and x.stride() != call.b_stride:
        call = call.of_tokens
    ready = call.ready
    is_b = x.is_contiguous() if call.b_stride is None else x.stride() == call.b_stride
    if not is_b:
        x = x.contiguous() if call.b_stride is None else turned_once(x, tuned.shares, _turned)
    is_direct = call.turned is None and to is not None and to.data_ptr() % ready.alignment_bytes == 0
    c = ready(aligned(x, ready.alignment_bytes), None, call.c, to if is_direct else None)
    if call.turned is None:
        return c if to is None or is_direct else to.copy_(c)
    y = c.new_empty_strided(*call.turned) if to is None else to
    turn_into(c, y)
    return y


def _turned(x: Tensor) -> Tensor:
    if x.stride(-1) != 1:
        return tokens_turned(x)
    k = x.shape[-1]
    n = x.numel() // k
    b = x.new_empty_strided((k, n), (n, 1))
    turn_into(x, b)
    return b


def _learn_linear(calls: DirectCalls, shape: torch.Size, tuned: Any, *, relu: bool) -> DirectCall | None:
    *rows, k = shape or (0,)
    m, n = calls.bound.tensors.weight.shape[0], math.prod(rows)
    ready = calls.kernel((k, n), relu, False, ())
    if ready is None:
        larger = calls.bound.larger((k, n), (relu, False, ()))
        if larger is None or not larger.fuses or larger.tokens_first is None:
            return None
        (launcher, reads_tokens), most = larger.tokens_first, larger.call[0][1]
        stride = _contiguous(shape)[1] if reads_tokens else (*_contiguous(rows)[1], most)
        kernel, c = replace(larger, launcher=launcher), _contiguous((most, m))
        made = calls.known[shape] = DirectCall(kernel, stride, c, _contiguous((*rows, m)), tokens=most)
        return made
    first, plain = (*_contiguous(rows)[1], n), _contiguous((*rows, m))
    c, turned, of_tokens = plain, None, None
    if n > 1 and m > 1:
        c, turned = (((*rows, m), first), None) if tuned.features_first else (_contiguous((m, n)), plain)
    if ready.tokens_first is not None:
        launcher, reads_tokens = ready.tokens_first
        other = replace(ready, launcher=launcher)
        if reads_tokens:
            of_tokens = DirectCall(other, None, plain)
        elif turned is not None:
            ready, c, turned = other, plain, None
    made = calls.known[shape] = DirectCall(ready, None if n == 1 else first, c, turned, of_tokens)
    return made


def convolution(x: Tensor, residual: Tensor | None, module: Any, *, relu: bool) -> Tensor | None:
    """Return what a convolution returns, by the kernel of just this image size and batch, or None."""
    calls: DirectCalls | None = module.lospmm_tuned.direct
    if calls is None or not calls.serve(x) or not (residual is None or calls.take(residual)):
        return None
    way, key = (module.stride, module.padding, module.dilation), (x.shape, relu, residual is None)
    call = calls.known.get(key)
    if call is None or call.way != way:
        call = _learn_convolution(calls, key, x, module, way)
    if call is None or not x.is_contiguous():
        return None
    ready = call.ready
    if residual is not None:
        if residual.shape != call.c[0] or not residual.is_contiguous():
            return None
        residual = aligned(residual, ready.alignment_bytes)
    return ready(aligned(x, ready.alignment_bytes), residual, call.c)


def _learn_convolution(
    calls: DirectCalls, key: tuple[torch.Size, bool, bool], x: Tensor, module: Any, way: tuple[Any, ...]
) -> DirectCall | None:
    weight, numbers = calls.bound.tensors.weight, way_of(module)
    images = as_images(x, weight.dim())
    if images is None or numbers is None:
        return None
    _, relu, is_alone = key
    ready = calls.kernel(tuple(images.shape), relu, not is_alone, tuple(number for pair in numbers for number in pair))
    if ready is None:
        return None
    shape = (*ready.out_shape[:2], *ready.out_shape[6 - x.dim() :])  # images of one row have no height
    made = calls.known[key] = DirectCall(ready, None, _contiguous(shape), way=way)
    return made


def _contiguous(shape: Sequence[int]) -> Layout:
    return tuple(shape), tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
