"""A model as a graph of ``torch.fx``, with what it writes in place.

``torch.fx`` takes ``a += b`` for ``a = a + b``, so that who has ``a`` by another name would be left with what it was.
"""

import copy
import functools
import operator
from types import FunctionType
from typing import Any

from torch import fx, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import functional

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
        graph = tracer.trace(model)
        traced = fx.GraphModule(tracer.root, graph, type(model).__name__)
    except Exception as error:  # whatever the model's own code does with a proxy
        raise Unsupported(f"torch.fx cannot follow the model: {str(error).splitlines()[0][:200]}") from error
    return copy.deepcopy(traced).eval()


def may_write(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node may write to a tensor, by PyTorch's names. To which one is not asked, since there are views."""
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace"):
        return True
    target: Any = node.target
    if node.op == "call_module":
        return any(getattr(one, "inplace", False) for one in graph.get_submodule(target).modules())
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
