"""Layers with what follows them in one module, so that a kernel does it before it stores.

``fused`` follows a model by ``torch.fx`` and takes a batch norm into the weights of the convolution before it, the
addition and the ReLU behind into ``FusedConv2d`` (the paper's fused Conv2D + ReLU, section 6.2), and a ReLU behind a
linear layer into ``FusedLinear``. Otherwise each is a pass of its own through memory.
"""

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_weights

from lospmm.nn.following import followed, has_hooks, in_place, may_write


class FusedConv2d(nn.Conv2d):
    """relu(conv2d(x) + residual), of which ReLU and the residual may be absent. Its parameters are a Conv2d's."""

    relu: bool
    adds: bool  # takes a residual

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        c = super().forward(input)
        c = c if residual is None else c + residual
        return functional.relu(c) if self.relu else c


class FusedLinear(nn.Linear):
    """relu(linear(x)). Its parameters are a Linear's."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.relu(super().forward(input))


_ADDITIONS: frozenset[Any] = frozenset({operator.add, torch.add, "add", "add_", in_place})
_RELUS: frozenset[Any] = frozenset({functional.relu, functional.relu_, torch.relu, torch.relu_, "relu", "relu_"})


def fused(model: nn.Module) -> fx.GraphModule:
    """A copy of ``model`` for inference with its layers fused with what follows. Its weights are its own.

    Give it to ``sparsify_``: where a layer stays dense it computes the same. The keys of its state_dict are those of
    ``model`` but for batch norms, which are gone, and masks of ``torch.nn.utils.prune``, which its weights have taken
    in. Modules with hooks are left alone. Raises Unsupported for a model that ``torch.fx`` cannot follow.
    """
    graph = followed(model)
    modules = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        fuse = _FUSES.get(type(modules.get(node.target))) if node.op == "call_module" else None
        if fuse is not None and _is_only_call(graph, node) and not has_hooks(modules[node.target]):
            fuse(graph, node)
    graph.graph.lint()
    graph.delete_all_unused_submodules()
    graph.recompile()
    return graph


def _is_only_call(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether nothing else calls the module, or reads its tensors, which may be given other values."""
    others = [one for one in graph.graph.nodes if one is not node and one.op in ("call_module", "get_attr")]
    return not any(f"{one.target}.".startswith(f"{node.target}.") for one in others)


def _fuse(graph: fx.GraphModule, convolution: fx.Node) -> None:
    module = graph.get_submodule(str(convolution.target))
    assert isinstance(module, nn.Conv2d)
    chain = [convolution]
    norm = _next(graph, chain)
    if norm is not None and _is_norm(graph, norm):
        _take_in(module, graph.get_submodule(str(norm.target)))
        chain.append(norm)
    residual = _take_addition(graph, chain)
    has_relu = _take_relu(graph, chain)
    if len(chain) == 1:
        return
    module.__class__ = FusedConv2d
    module.__dict__.update(relu=has_relu, adds=residual is not None)
    _replace(graph, chain, () if residual is None else (residual,))


def _fuse_linear(graph: fx.GraphModule, linear: fx.Node) -> None:
    chain = [linear]
    if _take_relu(graph, chain):
        graph.get_submodule(str(linear.target)).__class__ = FusedLinear
        _replace(graph, chain, ())


#: What can be fused, by its class.
_FUSES: Mapping[Any, Callable[[fx.GraphModule, fx.Node], None]] = MappingProxyType(
    {nn.Conv2d: _fuse, nn.Linear: _fuse_linear}
)


def _take_addition(graph: fx.GraphModule, chain: list[fx.Node]) -> fx.Node | None:
    """What is added to the chain's result, and to nothing else; the addition is then its end.

    An addition in place is one to a tensor that nothing else reads only where it is to the chain's own.
    """
    addition = _next(graph, chain)
    if addition is None or not _calls(graph, addition, _ADDITIONS) or addition.kwargs:
        return None
    is_in_place, terms = addition.target in (in_place, "add_"), addition.args
    if addition.target is in_place:
        if terms[0] != "iadd":
            return None
        terms = terms[1:]
    others = [one for one in terms if one is not chain[-1]]
    if len(others) != 1 or not isinstance(others[0], fx.Node) or (is_in_place and terms[0] is not chain[-1]):
        return None
    chain.append(addition)
    return others[0]


def _take_relu(graph: fx.GraphModule, chain: list[fx.Node]) -> bool:
    """Whether a ReLU, and nothing else, follows the chain; it is then its end."""
    relu = _next(graph, chain)
    if relu is None or not _calls(graph, relu, _RELUS):
        return False
    chain.append(relu)
    return True


def _replace(graph: fx.GraphModule, chain: list[fx.Node], more: tuple[fx.Node, ...]) -> None:
    """One call of the first node's module in place of the chain, with ``more`` arguments."""
    first, last = chain[0], chain[-1]
    with graph.graph.inserting_after(last):
        made = graph.graph.call_module(str(first.target), (*first.args, *first.kwargs.values(), *more))
    last.replace_all_uses_with(made)
    for node in reversed(chain):
        graph.graph.erase_node(node)


def _next(graph: fx.GraphModule, chain: list[fx.Node]) -> fx.Node | None:
    """The only use of what the chain computes.

    None also where anything is written to before it: the chain will be computed there, and reads its input then.
    """
    if len(chain[-1].users) != 1:
        return None
    user, node = next(iter(chain[-1].users)), chain[0].next
    while node is not user:
        if node not in chain and may_write(graph, node):
            return None
        node = node.next
    return user


def _calls(graph: fx.GraphModule, node: fx.Node, what: frozenset[Any]) -> bool:
    if node.op == "call_module":
        module = graph.get_submodule(str(node.target))
        return what is _RELUS and type(module) is nn.ReLU and not has_hooks(module)
    return node.op in ("call_function", "call_method") and node.target in what


def _is_norm(graph: fx.GraphModule, node: fx.Node) -> bool:
    if node.op != "call_module" or not _is_only_call(graph, node):
        return False
    module = graph.get_submodule(str(node.target))
    return type(module) is nn.BatchNorm2d and module.running_mean is not None and not has_hooks(module)


def _take_in(module: nn.Conv2d, norm: Any) -> None:
    """Scale the weights by a batch norm's."""
    weight, bias = fuse_conv_bn_weights(
        module.weight, module.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    )
    module.weight, module.bias = weight, bias
