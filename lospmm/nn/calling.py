"""Ways to call a model, which decide what a layer costs.

Called from Python, a small network waits for Python. Compiled, elementwise operations and transposes are fused, and the
dense convolutions of a network run ``channels_last``. Layers that are faster one by one may thus make a model slower.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from lospmm.errors import BadRequest

Called = Literal["eager", "graph", "compiled", "compiled_graph"]

#: Calls before timing: these compile, choose algorithms and allocate.
WARM_CALLS = 3

_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Calling:
    """Way to call a model: ``compiled`` by torch.compile, ``captured`` as a CUDA graph and replayed."""

    compiled: bool
    captured: bool


def calling_of(called: str) -> Calling:
    """Return the way of this ``called`` of ``sparsify_``; raises BadRequest."""
    if called not in (ways := get_args(Called)):
        raise BadRequest(f"called {called!r:.80}: choose {', '.join(ways)}")
    return Calling(compiled=called.startswith("compiled"), captured=called.endswith("graph"))


def apart(call: Callable[..., Any], *, fullgraph: bool = False) -> Callable[..., Any]:
    """Compile ``call`` as its own function: PyTorch checks a function's versions in turn, and stops after some."""

    def run(*given: Any, **named: Any) -> Any:
        return call(*given, **named)

    run.__code__ = run.__code__.replace(co_name=f"run_{next(_NUMBERS)}")
    compiled: Callable[..., Any] = torch.compile(run, dynamic=False, fullgraph=fullgraph)
    return compiled


def captured(call: Callable[[], Any], device: torch.device, calls: int = 1) -> Callable[[], Any]:
    """Capture so many calls as a CUDA graph; return the graph's replay."""
    with torch.cuda.device(device):
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(WARM_CALLS):  # libraries choose their algorithms
                call()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
    return graph.replay
