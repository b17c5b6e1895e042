"""A model as a graph of ``torch.fx``, with what it writes in place.

``torch.fx`` takes ``a += b`` for ``a = a + b``, so that who has ``a`` by another name would be left with what it was.
"""

import copy
import functools
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import Tensor, fx, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import functional
from torch.nn.utils import prune
from torch.nn.utils.prune import BasePruningMethod

from lospmm.errors import Unsupported

_OPERATORS = (
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor",
    "ilshift", "irshift",
)  # fmt: skip


def in_place(name: str, a: Any, b: Any) -> Any:
    """``a += b`` by the operator's name, as an expression: code of ``torch.fx`` would write to a number's name too."""
    return getattr(operator, name)(a, b)


class _Followed(fx.Proxy):
    def _in_place(self, name: str, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", in_place, (name, self, other), {})


for _name in _OPERATORS:
    setattr(_Followed, f"__{_name}__", functools.partialmethod(_Followed._in_place, _name))


class Follower(fx.Tracer):
    """Graphs name the class that made them, to be copied."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Followed(node, self)


def followed(model: nn.Module) -> fx.GraphModule:
    """A copy of a model as a graph, for inference. Raises Unsupported."""
    tracer = Follower()
    try:
        with evaluated(model):  # a forward that asks for it has the answer in the graph
            graph = tracer.trace(model)
        traced = fx.GraphModule(tracer.root, graph, type(model).__name__)
    except Exception as error:  # whatever the model's own code does with a proxy
        raise Unsupported(f"torch.fx cannot follow the model: {str(error).splitlines()[0][:200]}") from error
    return _copied(traced).eval()


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """In the mode for inference; every module gets its own mode back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _copied(traced: fx.GraphModule) -> fx.GraphModule:
    """With tensors of its own. What ``torch.nn.utils.prune`` masks is pruned for good, so that it can be changed."""
    # Weights that hooks compute lie beside the parameters, and with a gradient PyTorch does not copy them.
    beside = [one for module in traced.modules() for one in vars(module).values() if isinstance(one, Tensor)]
    copied = copy.deepcopy(traced, {id(one): one.detach().clone() for one in beside if not one.is_leaf})
    for module in copied.modules():
        for hook in [one for one in module._forward_pre_hooks.values() if isinstance(one, BasePruningMethod)]:
            prune.remove(module, hook._tensor_name)
    return copied


def may_write(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node may write to a tensor, by PyTorch's names. To which one is not asked, since there are views."""
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
        return any(one is True for one in node.args)  # inplace by its place
    # A model's own function, that ``torch.fx`` was told to call, and ``in_place``.
    return isinstance(target, FunctionType) and not home.startswith("torch")


def has_hooks(module: nn.Module) -> bool:
    """Whether anything sees, or changes, what the module is given or computes."""
    return bool(module._forward_pre_hooks or module._forward_hooks)
