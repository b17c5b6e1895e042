"""The time of a layer on its GPU, dense and with kernels, each as the other: its launches replayed by a graph.

For a model that will be compiled a layer is timed compiled too, between two elementwise operations: a transpose, or a
change of layout, is then written with these. A dense convolution counts in the faster of both layouts: among others of
its kind a compiler keeps all ``channels_last``. ``model_micros`` is the time of a whole model, as it will be called.
"""

import statistics
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lospmm.errors import Unsupported
from lospmm.nn.calling import Calling
from lospmm.nn.layer import product, way_of
from lospmm.nn.site import Site, call_with, convolution_of, evaluated

#: Calls that a graph holds: many enough that its start does not count.
_CALLS = 20

#: Replays, of which the median is taken.
_REPLAYS = 15

#: A whole model is called for so long, so many times, of which the median is taken; and before that.
_BLOCK_SECONDS, _BLOCKS, _WARM_CALLS = 0.03, 9, 3

Forward = Callable[..., Tensor]


def micros_of(call: Callable[[], object], device: torch.device, calls: int = _CALLS) -> float:
    """Microseconds of one call on the GPU, without what Python takes to start it: ``calls`` of them are a graph."""
    with torch.cuda.device(device), torch.no_grad():
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):  # libraries choose their algorithms
                call()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        graph.replay()
        times = []
        for _ in range(_REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1000.0 * start.elapsed_time(end) / calls)
    return statistics.median(times)


def example_of(site: Site, shape: tuple[int, ...], *, features_first: bool = False) -> Tensor:
    """Numbers of the shape that a layer is given, where its weights are."""
    device = site.tensors.weight.device
    if site.is_convolution:
        x = torch.randn(shape, device=device)
        return x if site.tensors.weight.dim() == 4 else x.squeeze(2)
    k, n = site.matrix.k, shape[0]
    return torch.randn(k, n, device=device).t() if features_first else torch.randn(n, k, device=device)


def _arguments(site: Site, x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """What a layer is called with: a residual too, where it adds one."""
    if not site.adds:
        return (x,)
    return x, torch.randn(convolution_of(site, shape).output_shape(site.matrix.m), device=x.device)


def signature(site: Site, shape: tuple[int, ...]) -> Hashable:
    """What the time of a dense layer depends on: layers of one signature take as long."""
    tensors = site.tensors
    parts = tuple(None if one is None else tuple(one.shape) for one in (tensors.weight, tensors.mask, tensors.bias))
    way = way_of(site.module) if site.is_convolution else None
    return type(site.module), site.weight, parts, shape, site.relu, site.adds, str(way), tensors.weight.device


def dense_micros(site: Site, shape: tuple[int, ...], *, compiled: bool = False) -> float:
    """Of a layer before it is swapped."""
    x = example_of(site, shape)
    if site.weight == "weight":
        arguments = _arguments(site, x, shape)
        found = _timed(site.module.forward, arguments, compiled=compiled)
        if not (compiled and x.dim() == 4):
            return found
        moved = tuple(one.to(memory_format=torch.channels_last) for one in arguments)
        return min(found, _timed(site.module.forward, moved, compiled=compiled))
    tensors = site.tensors
    weight = tensors.weight if tensors.mask is None else tensors.weight * tensors.mask
    return _timed(lambda given: functional.linear(given, weight, tensors.bias), (x,), compiled=compiled)


def sparse_micros(
    site: Site, shape: tuple[int, ...], *, fed_first: bool, sharing: int, compiled: bool = False
) -> float:
    """Of a layer that is swapped. ``sharing`` layers transpose their one input together."""
    x = example_of(site, shape, features_first=fed_first)
    tuned = site.module.lospmm_tuned
    if site.weight != "weight":
        return _timed(lambda given: product(given, tuned[site.weight], site.tensors), (x,), compiled=compiled)
    whole = _timed(site.module.forward, _arguments(site, x, shape), compiled=compiled)
    if sharing < 2 or fed_first:
        return whole
    without = example_of(site, shape, features_first=True)
    rest = _timed(site.module.forward, (without,), compiled=compiled)
    return rest + (whole - rest) / sharing


def _timed(forward: Forward, arguments: tuple[Tensor, ...], *, compiled: bool) -> float:
    run = _compiled_between(forward) if compiled else forward
    return micros_of(lambda: run(*arguments), arguments[0].device)


def _compiled_between(forward: Forward) -> Forward:
    def between(x: Tensor, *rest: Tensor) -> Tensor:
        return torch.relu(forward(torch.relu(x), *rest))

    torch.compiler.reset()  # each layer's graph is a first one, and not a reason to compile for any shape
    compiled: Forward = torch.compile(between, dynamic=False)
    return compiled


def model_micros(model: nn.Module, example: Any, calling: Calling) -> float:
    """Of one call of a whole model, from Python or as a graph's replay.

    Raises Unsupported where it cannot be compiled or captured.
    """
    device = next(model.parameters()).device
    call: Callable[..., Any] = model
    with torch.no_grad(), evaluated(model):
        try:
            if calling.compiled:
                torch.compiler.reset()
                call = torch.compile(model, dynamic=False)
            if calling.captured:
                return micros_of(lambda: call_with(call, example), device, calls=1)
            return _micros_called(lambda: call_with(call, example), device)
        except Exception as error:  # of PyTorch, its compiler and the model's own code
            how = "captured" if calling.captured else "compiled" if calling.compiled else "called"
            why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
            raise Unsupported(f"the model cannot be {how}: {why}; give called another value") from error
        finally:
            if calling.compiled:
                torch.compiler.reset()


def _micros_called(call: Callable[[], object], device: torch.device) -> float:
    """Of calls one after the other, as fast as they can be made."""
    for _ in range(_WARM_CALLS):
        call()
    calls = max(1, int(_BLOCK_SECONDS / max(_seconds(call, 1, device), 1e-6)))
    return 1e6 * statistics.median(_seconds(call, calls, device) for _ in range(_BLOCKS)) / calls


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
