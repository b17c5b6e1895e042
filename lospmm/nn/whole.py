"""Latency of a whole model as it will be called, with some layers dense and some on kernels.

What was compiled or captured in one state of the model stays valid while it is in others, so that two states can be
timed in turn (``paired``).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lospmm.errors import Unsupported
from lospmm.nn.calling import WARM_CALLS, Calling, apart, captured
from lospmm.nn.fusion import evaluated
from lospmm.nn.paired import Block
from lospmm.nn.site import call_with

#: Duration of a block of calls, which has at least one.
_BLOCK_SECONDS = 0.03

#: Sleep of the GPU while one call is launched: multiple of the call's time, limit, and a clock that no GPU exceeds.
_AHEAD, _MOST_AHEAD_SECONDS, _CYCLES_PER_SECOND = 2, 0.1, 3e9

#: Limit of torch.compile's versions of one function: one for each state of the model.
_RECOMPILES = 64


@contextmanager
def timed_whole(model: nn.Module, calling: Calling) -> Iterator[None]:
    """Put the model in inference mode for ``block_of`` and its blocks.

    For a compiled way of calling, PyTorch forgets its compiled code before and after.
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
    """Return a block that times back-to-back calls of the model in its present state, or graph replays.

    The model has to be in that state whenever the block runs. Raises Unsupported if it cannot be compiled or captured.
    """
    run, seconds = _made_ready(model, example, calling)
    device, calls = _device_of(model), max(1, int(_BLOCK_SECONDS / seconds))

    def block() -> float:
        run()  # warms caches and torch.compile's guards after the other state
        return 1e6 * _seconds(run, calls, device) / calls

    return block


def gpu_block_of(model: nn.Module, example: Any, calling: Calling) -> Block:
    """Return a block that times the GPU's work for one call, started after Python has launched it all.

    The time includes Python's if the call waits for the GPU, launches more than a stream's queue holds, or launches
    for longer than the GPU sleeps.
    """
    run, seconds = _made_ready(model, example, calling)
    device = _device_of(model)
    asleep = int(min(_AHEAD * seconds, _MOST_AHEAD_SECONDS) * _CYCLES_PER_SECOND)

    def block() -> float:
        run()
        _wait(device)
        with torch.cuda.device(device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(asleep)  # private, but PyTorch's own tests use it
            begin.record()
            run()
            end.record()
        _wait(device)
        return float(1e3 * begin.elapsed_time(end))

    return block


def _made_ready(model: nn.Module, example: Any, calling: Calling) -> tuple[Callable[[], Any], float]:
    """Return a warm call of the model in its present state, and its seconds."""
    device = _device_of(model)
    try:
        call = apart(model) if calling.compiled else model
        run: Callable[[], Any] = lambda: call_with(call, example)  # noqa: E731
        if calling.captured:
            run = captured(run, device)
        for _ in range(WARM_CALLS):
            run()
        return run, max(_seconds(run, 1, device), 1e-6)
    except Exception as error:  # PyTorch, its compiler and the model may raise anything
        how = "captured" if calling.captured else "compiled" if calling.compiled else "called"
        why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
        raise Unsupported(f"the model cannot be {how}: {why}; give called another value") from error


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


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
