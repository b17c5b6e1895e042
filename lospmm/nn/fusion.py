"""``fused``: layers joined with what follows them, so that a kernel computes it before it stores.

``torch.fx`` traces a model. A batch norm is folded into the weights of the convolution before it, the addition and the
ReLU behind a convolution become a ``FusedConv2d`` (the paper's fused Conv2D + ReLU, section 6.2), and a ReLU behind a
linear layer becomes a ``FusedLinear``. Otherwise each is a pass of its own through memory.

``torch.fx`` records ``a += b`` as ``a = a + b``, which other names of ``a`` would not see. The tracer here keeps the
write.
"""

import copy
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import functional
from torch.nn.utils import prune
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.nn.utils.prune import BasePruningMethod

from lospmm.errors import Unsupported


class FusedConv2d(nn.Conv2d):
    """Convolution relu(conv2d(x) + residual), with or without ReLU and residual."""

    relu: bool
    adds: bool  # takes a residual

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute the convolution and what is fused with it."""
        c = super().forward(input)
        c = c if residual is None else c + residual
        return functional.relu(c) if self.relu else c


class FusedLinear(nn.Linear):
    """Linear layer relu(linear(x))."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute the linear layer and its ReLU."""
        return functional.relu(super().forward(input))


_OPERATORS = (
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor",
    "ilshift", "irshift",
)  # fmt: skip


def in_place(name: str, a: Any, b: Any) -> Any:
    """Compute ``a += b``, given by its operator's name, as an expression that ``torch.fx`` can call."""
    return getattr(operator, name)(a, b)


class _Followed(fx.Proxy):
    def _in_place(self, name: str, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", in_place, (name, self, other), {})


for _name in _OPERATORS:
    setattr(_Followed, f"__{_name}__", functools.partialmethod(_Followed._in_place, _name))


class Follower(fx.Tracer):
    """Tracer that keeps writes in place; graphs name its class, to be copied."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return a proxy that records writes in place."""
        return _Followed(node, self)


def followed(model: nn.Module) -> fx.GraphModule:
    """Return a copy of a model as a graph, for inference; raises Unsupported."""
    tracer = Follower()
    try:
        with evaluated(model):  # the graph keeps the branch of evaluation mode
            graph = tracer.trace(model)
        traced = fx.GraphModule(tracer.root, graph, type(model).__name__)
    except Exception as error:  # the model's own code may raise anything
        raise Unsupported(f"torch.fx cannot follow the model: {str(error).splitlines()[0][:200]}") from error
    return _copied(traced).eval()


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode for a while, then every module in its own mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _copied(traced: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph with its tensors, and make pruning by ``torch.nn.utils.prune`` permanent."""
    # Weights computed by hooks are plain attributes; PyTorch does not copy those with a gradient.
    beside = [one for module in traced.modules() for one in vars(module).values() if isinstance(one, Tensor)]
    copied = copy.deepcopy(traced, {id(one): one.detach().clone() for one in beside if not one.is_leaf})
    for module in copied.modules():
        for hook in [one for one in module._forward_pre_hooks.values() if isinstance(one, BasePruningMethod)]:
            prune.remove(module, hook._tensor_name)
    return copied


def may_write(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node may write to a tensor, by PyTorch's names; any tensor, since it may be a view."""
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace"):
        return True
    target: Any = node.target
    if node.op == "call_module":
        return any(getattr(one, "inplace", False) or has_hooks(one) for one in graph.get_submodule(target).modules())
    if node.op == "call_method":
        return bool(target.endswith("_"))
    if node.op != "call_function":
        return False
    name, home = getattr(target, "__name__", "_"), getattr(target, "__module__", None) or ""
    if name.endswith("_") or isinstance(target, OpOverload | OpOverloadPacket):
        return True
    if home == functional.__name__:
        return any(one is True for one in node.args)  # inplace as a positional argument
    # Functions wrapped for torch.fx, and in_place.
    return isinstance(target, FunctionType) and not home.startswith("torch")


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks see, or change, the input or the result of a module."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


_ADDITIONS: frozenset[Any] = frozenset({operator.add, torch.add, "add", "add_", in_place})
_RELUS: frozenset[Any] = frozenset({functional.relu, functional.relu_, torch.relu, torch.relu_, "relu", "relu_"})


def fused(model: nn.Module) -> fx.GraphModule:
    """Return a copy of ``model`` for inference, with its layers fused with what follows them.

    The copy has its own weights and computes what ``model`` does; give it to ``sparsify_``. Its state_dict has the keys
    of ``model`` without batch norms and without masks of ``torch.nn.utils.prune``, which its weights include. Modules
    with hooks are not fused. Raises Unsupported for a model that ``torch.fx`` cannot trace.
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
    """Return whether no other node calls the module or reads its tensors, which fusing changes."""
    others = [one for one in graph.graph.nodes if one is not node and one.op in ("call_module", "get_attr")]
    return not any(f"{one.target}.".startswith(f"{node.target}.") for one in others)


def _fuse(graph: fx.GraphModule, convolution: fx.Node) -> None:
    module = graph.get_submodule(str(convolution.target))
    assert isinstance(module, nn.Conv2d)
    chain = [convolution]
    norm = _next(graph, chain)
    if norm is not None and _is_norm(graph, norm):
        _fold(module, graph.get_submodule(str(norm.target)))
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


#: Fusion of each class of module.
_FUSES: Mapping[Any, Callable[[fx.GraphModule, fx.Node], None]] = MappingProxyType(
    {nn.Conv2d: _fuse, nn.Linear: _fuse_linear}
)


def _take_addition(graph: fx.GraphModule, chain: list[fx.Node]) -> fx.Node | None:
    """Append the addition that alone uses the chain's result; return its other term, or None.

    An addition in place has to write to the chain's own result: other tensors may have other readers.
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
    """Append the ReLU that alone uses the chain's result; return whether there is one."""
    relu = _next(graph, chain)
    if relu is None or not _calls(graph, relu, _RELUS):
        return False
    chain.append(relu)
    return True


def _replace(graph: fx.GraphModule, chain: list[fx.Node], more: tuple[fx.Node, ...]) -> None:
    """Replace the chain by one call of its first node's module, with ``more`` arguments."""
    first, last = chain[0], chain[-1]
    with graph.graph.inserting_after(last):
        made = graph.graph.call_module(str(first.target), (*first.args, *first.kwargs.values(), *more))
    last.replace_all_uses_with(made)
    for node in reversed(chain):
        graph.graph.erase_node(node)


def _next(graph: fx.GraphModule, chain: list[fx.Node]) -> fx.Node | None:
    """Return the only user of the chain's result, or None.

    None too if a node between them may write: the fused chain reads its input after that write.
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


def _fold(module: nn.Conv2d, norm: Any) -> None:
    """Fold a batch norm into the weights of a convolution."""
    weight, bias = fuse_conv_bn_weights(
        module.weight, module.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    )
    module.weight, module.bias = weight, bias
