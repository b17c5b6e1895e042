"""The time of a whole model as it will be called, in the state that it is in: some layers dense, some on kernels.

What is made ready in one state (compiled, captured) is kept while the model is in others, so that two states can be
timed in turn (``turns``).
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lospmm.errors import Unsupported
from lospmm.nn.calling import Calling
from lospmm.nn.following import evaluated
from lospmm.nn.paired import Block
from lospmm.nn.site import call_with

#: A block of calls takes so long, or one call.
_BLOCK_SECONDS = 0.03

#: Before anything is timed: compiling, choosing algorithms, allocating.
_WARM_CALLS = 3

#: The GPU waits for so many calls' time while one is launched, so long at most; at a clock that no GPU is above.
_AHEAD, _MOST_AHEAD_SECONDS, _CYCLES_PER_SECOND = 2, 0.1, 3e9

#: How often PyTorch may compile one piece of code: once for each state, and there are few.
_RECOMPILES = 64

_NUMBERS = itertools.count()


@contextmanager
def timed_whole(model: nn.Module, calling: Calling) -> Iterator[None]:
    """Around ``block_of`` and its blocks: the model as it is for inference.

    Where it is compiled, PyTorch forgets what it has compiled, before and after.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluated(model))
        if calling.compiled:
            torch.compiler.reset()
            stack.callback(torch.compiler.reset)
            stack.enter_context(torch._dynamo.config.patch(cache_size_limit=_RECOMPILES))
        yield


def block_of(model: nn.Module, example: Any, calling: Calling) -> Block:
    """Calls of a model in its present state, as fast as they can be made, or replays of a graph of one.

    The model has to be in that state again whenever the block is run. Raises Unsupported where it cannot be compiled or
    captured.
    """
    run, seconds = _made_ready(model, example, calling)
    device, calls = _device_of(model), max(1, int(_BLOCK_SECONDS / seconds))

    def block() -> float:
        run()  # what the other way left in caches, and guards that look at other compiled code first
        return 1e6 * _seconds(run, calls, device) / calls

    return block


def gpu_block_of(model: nn.Module, example: Any, calling: Calling) -> Block:
    """As ``block_of``, of what the GPU does for one call: it begins when Python has launched all of it.

    A call that waits for the GPU itself, or launches more than a stream holds or for longer than the GPU waits, has
    Python in its time all the same.
    """
    run, seconds = _made_ready(model, example, calling)
    device = _device_of(model)
    asleep = int(min(_AHEAD * seconds, _MOST_AHEAD_SECONDS) * _CYCLES_PER_SECOND)

    def block() -> float:
        run()
        _wait(device)
        with torch.cuda.device(device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(asleep)  # nobody says that it stays, but PyTorch's own tests need it
            begin.record()
            run()
            end.record()
        _wait(device)
        return float(1e3 * begin.elapsed_time(end))

    return block


def _made_ready(model: nn.Module, example: Any, calling: Calling) -> tuple[Callable[[], Any], float]:
    """A call of the model in its present state that compiles and chooses nothing any more, and its seconds."""
    device = _device_of(model)
    try:
        call = apart(model) if calling.compiled else model
        run: Callable[[], Any] = lambda: call_with(call, example)  # noqa: E731
        if calling.captured:
            run = captured(run, device)
        for _ in range(_WARM_CALLS):
            run()
        return run, max(_seconds(run, 1, device), 1e-6)
    except Exception as error:  # of PyTorch, its compiler and the model's own code
        how = "captured" if calling.captured else "compiled" if calling.compiled else "called"
        why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
        raise Unsupported(f"the model cannot be {how}: {why}; give called another value") from error


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def apart(call: Callable[..., Any], *, fullgraph: bool = False) -> Callable[..., Any]:
    """``call`` compiled for itself: PyTorch keeps compiled code by the function, and looks through all that it has."""

    def run(*given: Any, **named: Any) -> Any:
        return call(*given, **named)

    run.__code__ = run.__code__.replace(co_name=f"run_{next(_NUMBERS)}")
    compiled: Callable[..., Any] = torch.compile(run, dynamic=False, fullgraph=fullgraph)
    return compiled


def captured(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """A CUDA graph of one call, as what replays it."""
    with torch.cuda.device(device):
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(_WARM_CALLS):  # libraries choose their algorithms
                call()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    return graph.replay


def _seconds(call: Callable[[], object], calls: int, device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    for _ in range(calls):
        call()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
