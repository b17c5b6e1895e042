"""Ways to call a model, which decide what a layer costs.

Called from Python, a small network waits for Python. Compiled, elementwise operations and transposes are fused, and the
dense convolutions of a network run ``channels_last``. Layers that are faster one by one may thus make a model slower.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from lospmm.errors import BadRequest

Called = Literal["eager", "graph", "compiled", "compiled_graph"]


@dataclass(frozen=True, slots=True)
class Calling:
    """Way to call a model: ``compiled`` by torch.compile, ``captured`` as a CUDA graph and replayed."""

    compiled: bool
    captured: bool


#: Ways by the ``called`` of ``sparsify_``.
CALLINGS: Mapping[str, Calling] = MappingProxyType(
    {
        "eager": Calling(compiled=False, captured=False),
        "graph": Calling(compiled=False, captured=True),
        "compiled": Calling(compiled=True, captured=False),
        "compiled_graph": Calling(compiled=True, captured=True),
    }
)


def calling_of(called: str) -> Calling:
    """Return the way with this name; raises BadRequest."""
    if called not in CALLINGS:
        raise BadRequest(f"called {called!r:.80}: choose {', '.join(CALLINGS)}")
    return CALLINGS[called]
