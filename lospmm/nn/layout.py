"""Tensors that may stay features first, found in one forward of the dense model.

Elementwise operations keep the strides of a tensor. A layer's result is followed through them: if it reaches nothing
but other pruned layers, it need not be transposed. Anything else, such as a view, gets the tensor tokens first.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lospmm.nn.site import Site, run

_ATEN = torch.ops.aten

#: Operators whose result has the strides of their input.
_ELEMENTWISE = frozenset(
    {
        _ATEN.add, _ATEN.sub, _ATEN.mul, _ATEN.div, _ATEN.neg, _ATEN.relu, _ATEN.relu_, _ATEN.gelu, _ATEN.gelu_,
        _ATEN.silu, _ATEN.silu_, _ATEN.sigmoid, _ATEN.tanh, _ATEN.hardswish, _ATEN.hardswish_, _ATEN.leaky_relu,
        _ATEN.leaky_relu_, _ATEN.hardtanh, _ATEN.hardtanh_, _ATEN.elu, _ATEN.softplus, _ATEN.clamp, _ATEN.clamp_min,
        _ATEN.erf, _ATEN.pow, _ATEN.add_, _ATEN.mul_, _ATEN.sub_, _ATEN.div_, _ATEN.mish, _ATEN.detach, _ATEN.exp,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """Flow of tensors between layers, by name."""

    reaches: Mapping[str, frozenset[str]]  # layers that a layer's result reaches
    escapes: frozenset[str]  # layers whose result also reaches something else
    fed_by: Mapping[str, frozenset[str]]  # layers whose results are a layer's input
    with_same_input: tuple[tuple[str, ...], ...]  # layers that take one tensor, in the order of their calls

    def features_first(self, swapped: Collection[str]) -> frozenset[str]:
        """Return the layers that may leave their result features first, if only ``swapped`` run on kernels."""
        return frozenset(
            name
            for name in swapped
            if name not in self.escapes and self.reaches.get(name) and self.reaches[name] <= set(swapped)
        )

    def is_fed_first(self, name: str, first: Collection[str]) -> bool:
        """Return whether the input of a layer is features first already."""
        feeding = self.fed_by.get(name, frozenset())
        return bool(feeding) and feeding <= set(first)

    def sharing(self, name: str, swapped: Collection[str]) -> tuple[str, ...]:
        """Return the layers with the same input as this one, itself included, in the order of their calls."""
        groups = [tuple(one for one in group if one in swapped) for group in self.with_same_input if name in group]
        return groups[0] if len(groups) == 1 and len(set(groups[0])) == len(groups[0]) else (name,)


#: Layout without an example: every result is tokens first.
UNKNOWN = Layout({}, frozenset(), {}, ())


class _LayoutWatch(TorchDispatchMode):
    """Flow seen so far; a tensor's tags are the layers whose result it is, up to elementwise operations."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Any = WeakIdKeyDictionary()
        self.inputs: Any = WeakIdKeyDictionary()
        self.reaches: defaultdict[str, set[str]] = defaultdict(set)
        self.escapes: set[str] = set()
        self.fed_by: defaultdict[str, set[str]] = defaultdict(set)
        self.strangers: set[str] = set()  # layers with other inputs too
        self.inside = 0
        self.groups: list[list[str]] = []  # layers that take one tensor

    def of(self, tensor: object) -> frozenset[str]:
        return self.tags.get(tensor, frozenset()) if isinstance(tensor, Tensor) else frozenset()

    def enter(self, name: str, _module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        x = given[0] if given else named["input"]
        tags = self.of(x)
        for tag in tags:
            self.reaches[tag].add(name)
        self.fed_by[name] |= tags
        if not tags:
            self.strangers.add(name)
        group = self.inputs.setdefault(x, [])
        group.append(name)
        if len(group) == 2:  # the tensor may be freed before the forward ends
            self.groups.append(group)
        self.inside += 1

    def leave(self, name: str, _module: nn.Module, _given: tuple[Any, ...], y: Tensor) -> None:
        self.inside -= 1
        self.tags[y] = frozenset({name})

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs or {})) if isinstance(one, Tensor)]
        tags = frozenset[str]().union(*map(self.of, given))
        if self.inside or not tags:
            return result
        if func.overloadpacket in _ELEMENTWISE and isinstance(result, Tensor) and self._is_of_one_layout(given, result):
            self.tags[result] = tags
        else:
            self.escapes |= tags
        return result

    def _is_of_one_layout(self, given: Sequence[Tensor], result: Tensor) -> bool:
        """Return whether all operands of the result's size come from layers, so that strides agree."""
        return all(self.of(one) for one in given if one.numel() == result.numel()) and result.dim() >= 2

    def layout(self) -> Layout:
        fed_by = {name: frozenset(tags) for name, tags in self.fed_by.items() if name not in self.strangers}
        groups = tuple(dict.fromkeys(map(tuple, self.groups)))
        return Layout({n: frozenset(to) for n, to in self.reaches.items()}, frozenset(self.escapes), fed_by, groups)


def watch_layout(model: nn.Module, sites: Sequence[Site], example: Any) -> Layout:
    """Follow one forward of the dense model; ``example`` is as for ``learn_shapes``."""
    watch = _LayoutWatch()
    products = {site.module: site.name for site in sites if site.weight == "weight" and not site.is_convolution}
    with ExitStack() as stack:
        for module, name in products.items():
            # Innermost, so that the user's hooks see no difference.
            enter, leave = partial(watch.enter, name), partial(watch.leave, name)
            stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(leave, prepend=True))
        with watch:
            outcome = run(model, example)
    for tensor in tree_leaves(outcome):
        watch.escapes |= watch.of(tensor)
    return watch.layout()
