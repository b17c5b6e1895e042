"""Layers whose products are tuned kernels: the same modules as before, of another class.

Nothing of a module is replaced, so that its parameters, its name, its hooks and the keys of its state_dict stay, and
``restore`` takes nothing but its class back. What a kernel cannot do is done as it was before.

**Layout.** A kernel reads B features first (K x N); a Linear's activations are tokens x features. ``forward``
transposes what comes in and what goes out, unless it is there already: elementwise operations keep the order of a
tensor in memory, so that between two layers with nothing else between them, of which the first is ``features_first``,
nothing is moved. This is to a Linear what ``channels_last`` is to a convolution: a matter of strides, on which no
result depends.

**More columns than any kernel has** go through it in pieces. What is transposed is written anew anyway, so that a piece
of tokens becomes a B of a kernel's own width: the kernel is as fast as for its own N, and needs no N at run time.
"""

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from lospmm.nn import operator
from lospmm.nn.bound import BoundKernels, ColumnBucket, Tensors, bind, release, serves_images
from lospmm.nn.dtypes import torch_dtype_of
from lospmm.nn.fusion import FusedConv2d, FusedLinear
from lospmm.nn.place import WeightPlace, forget_mask, take_hooks, tensors_of
from lospmm.nn.transpose import prepare, turn_into, turned

#: The attribute of a tensor that holds it transposed.
_TRANSPOSED = "lospmm_transposed"

#: Stride, padding and dilation, each along height and width.
Way: TypeAlias = tuple[list[int], list[int], list[int]]


#: The first layer that is given a tensor transposes it and keeps that with the tensor; the last takes it away.
Shares: TypeAlias = Literal["no", "first", "next", "last"]


@dataclass(frozen=True, slots=True)
class Tuned:
    """The kernels of one weight of a layer; ``sizes`` are (least, most) columns of each bucket, ascending."""

    name: str
    place: WeightPlace
    buckets: tuple[ColumnBucket, ...]
    emulate: bool = False
    features_first: bool = False  # leave what is computed as the kernel wrote it
    shares: Shares = "no"  # what is done with the transposed input, which other layers are given too
    sizes: tuple[tuple[int, int], ...] = ()
    inputs: tuple[
        tuple[tuple[int, ...], tuple[int, ...], int], ...
    ] = ()  # of a convolution, as ``serves_images`` has it
    dtype: torch.dtype = torch.float32  # of what the kernels take


@dataclass(slots=True, eq=False)
class State:
    """What a layer had before, and has besides: all that ``restore`` needs."""

    original: type[nn.Module]
    tuned: dict[str, Tuned] = field(default_factory=dict)
    bound: dict[str, BoundKernels] = field(default_factory=dict)
    hooks: dict[int, Any] = field(default_factory=dict)  # of torch.nn.utils.prune, which there is no need of
    end: Any = None  # the ``weakref.finalize`` that lets go of all when the module is no more


class Sparse(nn.Module):
    """Of every layer that has kernels: keeps them bound to its weights, wherever these are moved."""

    lospmm_state: Any
    lospmm_tuned: Any

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Sparse":
        applied = super()._apply(fn, recurse)
        rebind(self)
        return applied

    def _load_from_state_dict(self, *arguments: Any, **named: Any) -> None:
        super()._load_from_state_dict(*arguments, **named)
        rebind(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _watch(self, self.lospmm_state)
        rebind(self)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["lospmm_state"] = replace(state["lospmm_state"], bound={}, end=None)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> "Sparse":
        # Classes of parametrizations have one of their own, which copies what is bound as well.
        copied: Sparse = self.__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied


def product(x: Tensor, tuned: Tuned, tensors: Tensors, *, relu: bool = False) -> Tensor:
    """(..., m) of ``x`` (..., k), through the operator, with the transposes that are not avoided."""
    n = x.numel() // x.shape[-1]
    if n > tuned.sizes[-1][1]:
        y = _in_pieces(x.reshape(n, x.shape[-1]), tuned, tensors, relu=relu)
        return _as_given(y, x)
    is_alone = torch.compiler.is_compiling() or tuned.shares == "no"
    b = _transposed(x) if is_alone else _transposed_once(x, tuned.shares)
    c = operator.spmm(b, tensors.weight, tensors.mask, tensors.bias, None, relu)
    c = c.t() if tuned.features_first else turned(c)
    return _as_given(c, x)


def _as_given(c: Tensor, x: Tensor) -> Tensor:
    """(n, m) as (..., m) of an ``x`` (..., k)."""
    if x.dim() == 2:
        return c
    return c.squeeze(0) if x.dim() == 1 else c.unflatten(0, x.shape[:-1])


def pieces(sizes: tuple[tuple[int, int], ...], n: int) -> tuple[tuple[int, int], ...]:
    """(first, end) of the pieces of ``n`` columns that kernels compute; ``sizes`` as in ``Tuned``.

    As many of the largest as there are, and the rest by a kernel that it fills enough. What none does is left out: the
    dense layer is faster for it.
    """
    if not sizes or n < 1:
        return ()
    most = sizes[-1][1]
    found = [(first, first + most) for first in range(0, n - most + 1, most)]
    rest = n % most
    if any(least <= rest <= size for least, size in sizes):
        found.append((n - rest, n))
    return tuple(found)


def _in_pieces(x: Tensor, tuned: Tuned, tensors: Tensors, *, relu: bool) -> Tensor:
    """(n, m) of ``x`` (n, k), piece by piece. Compiled, the transposes are written where the pieces are joined."""
    ends = pieces(tuned.sizes, x.shape[0])
    dense = x[ends[-1][1] :]
    with _unlowered(x, tuned):
        rest = [_dense(dense, tensors, relu=relu)] if len(dense) else []
    parts = [
        operator.spmm(turned(x[first:end]), tensors.weight, tensors.mask, tensors.bias, None, relu)
        for first, end in ends
    ]
    if tuned.features_first:
        return torch.cat([*parts, *(one.t() for one in rest)], dim=1).t()
    if torch.compiler.is_compiling():
        return torch.cat([*(part.t() for part in parts), *rest])
    y = x.new_empty((x.shape[0], tensors.weight.shape[0]))
    for part, (first, end) in zip(parts, ends, strict=True):
        turn_into(part, y[first:end])
    if rest:
        y[ends[-1][1] :] = rest[0]
    return y


def _transposed(x: Tensor) -> Tensor:
    return turned(x.reshape(-1, x.shape[-1]))


def _transposed_once(x: Tensor, shares: Shares) -> Tensor:
    """``_transposed``, for all layers that are given ``x`` one after the other.

    The first never takes what lies there: whoever fills a tensor anew from call to call, or captures a graph of it, may
    do so without PyTorch's knowledge. A tensor of inference mode does not say when it is written to, not even in
    between, and is transposed each time.
    """
    if x.is_inference():
        return _transposed(x)
    kept = x.__dict__.pop(_TRANSPOSED, None)
    if kept is None or shares == "first" or kept[0] != x._version:
        kept = x._version, _transposed(x)
    if shares != "last" and kept[1].data_ptr() != x.data_ptr():  # else it is what it was made of
        x.__dict__[_TRANSPOSED] = kept
    return kept[1]


def is_dense(x: Tensor) -> bool:
    """Whether it lies in memory as kernels read it: neither sparse nor nested."""
    return x.layout is torch.strided and not x.is_nested


def _is_taken(x: Tensor, tuned: Tuned) -> bool:
    return x.dtype is tuned.dtype and is_dense(x)


def _unlowered(x: Tensor, tuned: Tuned) -> AbstractContextManager[Any]:
    """Around what is dense of a layer with kernels for such elements: of autocast's type a result would be of one type
    or another by its number of columns, or in part."""
    if (tuned.sizes or tuned.inputs) and _is_taken(x, tuned) and torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


def serves(tuned: Tuned, x: Tensor) -> bool:
    """Whether kernels hold so many columns. No look at any tensor, so that it is decided when a graph is compiled."""
    if not _is_taken(x, tuned) or x.dim() < 1 or x.shape[-1] == 0:
        return False
    return bool(pieces(tuned.sizes, x.numel() // x.shape[-1]))


class SparseLinear(Sparse, nn.Linear):
    """nn.Linear, its bias in the kernel."""

    def forward(self, input: Tensor) -> Tensor:
        return self._multiplied(input, relu=False)

    def _multiplied(self, x: Tensor, *, relu: bool) -> Tensor:
        tuned = self.lospmm_tuned
        tensors = tensors_of(self, tuned.place)
        if serves(tuned, x):
            return product(x, tuned, tensors, relu=relu)
        with _unlowered(x, tuned):
            return _dense(x, tensors, relu=relu)


class SparseFusedLinear(SparseLinear, FusedLinear):
    """A linear layer with the ReLU behind it, in one kernel."""

    def forward(self, input: Tensor) -> Tensor:
        return self._multiplied(input, relu=True)


class _SparseConvolution(Sparse):
    """What convolutions of one and of two dimensions share."""

    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    padding_mode: str
    lospmm_tuned: Any

    def forward(self, input: Tensor) -> Tensor:
        return self._convolved(input, None, relu=False)

    def _convolved(self, x: Tensor, residual: Tensor | None, *, relu: bool) -> Tensor:
        tuned = self.lospmm_tuned
        tensors = tensors_of(self, tuned.place)
        weight, mask, bias = tensors.weight, tensors.mask, tensors.bias
        way = way_of(self)
        inner = as_images(x, weight.dim())
        if way is not None and inner is not None and _is_taken(x, tuned) and _has_kernel(tuned, inner.shape):
            images = [one if one is None else as_images(one, one.dim()) for one in (weight, mask)]
            c = operator.conv2d(inner, images[0], images[1], bias, residual, relu, *way)
            return c if weight.dim() == 4 else c.squeeze(2)
        with _unlowered(x, tuned):
            c = self._conv_forward(x, _effective(tensors), bias)
        c = c if residual is None else c + residual
        return functional.relu(c) if relu else c


class SparseConv2d(_SparseConvolution, nn.Conv2d):
    """nn.Conv2d, for images of the sizes that it has kernels for, as many or fewer."""


class SparseConv1d(_SparseConvolution, nn.Conv1d):
    """nn.Conv1d, as a convolution of images of one row."""


class SparseFusedConv2d(_SparseConvolution, FusedConv2d):
    """A convolution with the residual and the ReLU behind it, in one kernel."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return self._convolved(input, residual, relu=self.relu)


def _has_kernel(tuned: Tuned, shape: Sequence[int]) -> bool:
    return any(serves_images(*one, shape) for one in tuned.inputs)


def as_images(x: Tensor, dimensions: int) -> Tensor | None:
    """An input of a convolution, or its weight, in four dimensions; None for one without a batch."""
    if x.dim() != dimensions:
        return None
    return x if dimensions == 4 else x.unsqueeze(2)


def way_of(module: nn.Module) -> Way | None:
    """Stride, padding and dilation of a convolution in two dimensions; None for padding that differs at both ends."""
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


def _dense(x: Tensor, tensors: Tensors, *, relu: bool) -> Tensor:
    y = functional.linear(x, _effective(tensors), tensors.bias)
    return functional.relu(y) if relu else y


def _effective(tensors: Tensors) -> Tensor:
    return tensors.weight if tensors.mask is None else tensors.weight * tensors.mask


#: The class that a module of each class becomes. Those that parametrizations made are made when they are met.
CLASSES: Mapping[type[nn.Module], type[Sparse]] = {
    nn.Linear: SparseLinear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: SparseLinear,
    nn.Conv1d: SparseConv1d,
    nn.Conv2d: SparseConv2d,
    FusedConv2d: SparseFusedConv2d,
    FusedLinear: SparseFusedLinear,
}


#: Classes that parametrizations have made, and what they became.
_PARAMETRIZED: dict[type[nn.Module], type[Sparse]] = {}


def sparse_class(original: type[nn.Module], classes: Mapping[type[nn.Module], type[Sparse]]) -> type[Sparse] | None:
    """The class with kernels for exactly this class; None where there is none, as for one with a forward of its own."""
    if original in classes or original in _PARAMETRIZED:
        return classes.get(original) or _PARAMETRIZED[original]
    sparse = classes.get(original.__bases__[0])
    if sparse is None or not original.__name__.startswith("Parametrized"):  # as torch.nn.utils.parametrize names it
        return None
    made: type[Sparse] = type(sparse.__name__, (sparse, original), {})
    _PARAMETRIZED[original] = made
    return made


def swap(module: nn.Module, tuned: Mapping[str, Tuned], sparse: type[Sparse]) -> None:
    """Have a module run on these kernels, by the name of each weight."""
    state: State | None = module.__dict__.get("lospmm_state")
    if state is None:
        state = module.__dict__["lospmm_state"] = State(type(module))
        module.__class__ = sparse
        _watch(module, state)
    state.tuned = {name: _summed_up(one) for name, one in tuned.items()}
    for name in tuned:
        state.hooks |= take_hooks(module, name)
    rebind(module)


def _watch(module: nn.Module, state: State) -> None:
    state.end = weakref.finalize(module, let_go, state)
    state.end.atexit = False


def restore(module: nn.Module) -> None:
    """The module as it was before ``swap`` and before its weights were looked for."""
    names = tuple(module.__dict__["lospmm_state"].tuned)
    unswap(module)
    for name in names:
        forget_mask(module, name)


def unswap(module: nn.Module) -> None:
    """The module as it was before ``swap``, which can be called again."""
    state: State = module.__dict__.pop("lospmm_state")
    module.__dict__.pop("lospmm_tuned", None)
    let_go(state)
    state.end.detach()  # which keeps the state and its kernels otherwise for as long as there is the module
    module.__class__ = state.original
    module._forward_pre_hooks.update(state.hooks)


def rebind(module: nn.Module) -> None:
    """Bind the kernels to the weights where they are now; a layer that cannot have them there is dense."""
    state: State = module.__dict__["lospmm_state"]
    warned = {name: bound.warned for name, bound in state.bound.items()}
    let_go(state)
    usable = {name: _bound(module, state, name, warned.get(name, set())) for name in state.tuned}
    # Of a layer with one weight, its kernels; of several, all of them.
    module.__dict__["lospmm_tuned"] = usable["weight"] if set(usable) == {"weight"} else usable


def _bound(module: nn.Module, state: State, name: str, warned: set[str]) -> Tuned:
    """What ``forward`` looks at: no buckets where there is no kernel for this place."""
    tuned = state.tuned[name]
    tensors = tensors_of(module, tuned.place)
    if not tensors.weight.is_meta:
        if tensors.weight.is_cuda:
            prepare(tensors.weight.device)
        bound = state.bound[name] = bind(tuned.name, tensors, tuned.buckets, emulate=tuned.emulate)
        bound.warned |= warned
        if bound.refusal is not None:
            bound.warn_once(bound.refusal)
        if bound.ready:
            return tuned
    return replace(tuned, sizes=(), inputs=())


def let_go(state: State) -> None:
    """Unbind the kernels of a module."""
    for bound in state.bound.values():
        release(bound)
    state.bound = {}


def _summed_up(tuned: Tuned) -> Tuned:
    """With what a compiled graph is decided by: plain numbers, the same for layers of the same shapes."""
    products = sorted((b for b in tuned.buckets if len(b.call[0]) == 2), key=lambda bucket: bucket.call[0][1])
    sizes = tuple((bucket.least, bucket.call[0][1]) for bucket in products)
    inputs = tuple((b.call[0], b.out_shape, b.least) for b in tuned.buckets if len(b.call[0]) == 4)
    dtype = torch_dtype_of(tuned.buckets[0].kernel.artifact.manifest)
    return replace(tuned, sizes=sizes, inputs=inputs, dtype=dtype)
