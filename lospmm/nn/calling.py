"""How a model will be called, which decides what a layer costs, and how many of its layers are faster on kernels then.

Called from Python, a small network waits for Python. Compiled, what is elementwise beside a layer is fused, a transpose
with it, and the dense convolutions of a network run ``channels_last``. So layers that are faster one by one may make a
model slower. Whether they do is timed; ``settled`` says how many to keep.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from lospmm.errors import BadRequest

Called = Literal["eager", "graph", "compiled", "compiled_graph"]


@dataclass(frozen=True, slots=True)
class Calling:
    """``compiled`` by ``torch.compile``; ``captured`` as a CUDA graph, which is replayed."""

    compiled: bool
    captured: bool


#: By the name that ``sparsify_`` is given.
CALLINGS: Mapping[str, Calling] = MappingProxyType(
    {
        "eager": Calling(compiled=False, captured=False),
        "graph": Calling(compiled=False, captured=True),
        "compiled": Calling(compiled=True, captured=False),
        "compiled_graph": Calling(compiled=True, captured=True),
    }
)


def calling_of(called: str) -> Calling:
    """Raises BadRequest."""
    if called not in CALLINGS:
        raise BadRequest(f"called {called!r:.80}: choose {', '.join(CALLINGS)}")
    return CALLINGS[called]


def settled(count: int, dense: float, measure: Callable[[int], float]) -> tuple[int, float]:
    """Of ``count`` layers in the order of what they gain, how many are to run on kernels, and the model's time then.

    ``measure`` gives the time of the whole model with so many of them, 1 to ``count``, in the unit of ``dense``, which
    is its time with none: never more than that. Half as many are tried as long as that is faster, or nothing is; then
    the numbers between the best and those tried beside it. A trial may compile the model, so these are few: two more
    than ``count`` has bits, at most.
    """
    times = {0: dense}
    best = 0

    def tried(keep: int) -> bool:
        nonlocal best
        times[keep] = measure(keep)
        is_better = times[keep] < times[best]
        best = keep if is_better else best
        return is_better

    keep = count
    while keep and (tried(keep) or not best):
        keep //= 2
    middle = best
    below = max((one for one in times if one < middle), default=0)
    above = min((one for one in times if one > middle), default=middle)
    for between in ((middle + above) // 2, (below + middle) // 2):
        if between not in times:
            tried(between)
    return best, times[best]
