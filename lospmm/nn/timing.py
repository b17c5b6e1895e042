"""The time of a whole layer on its GPU, dense and with kernels, each as the other: its launches replayed by a graph."""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from lospmm.nn.layer import product
from lospmm.nn.site import Site, convolution_of

#: Calls that a graph holds: many enough that its start does not count.
_CALLS = 20

#: Replays, of which the median is taken.
_REPLAYS = 15


def micros_of(call: Callable[[], object], device: torch.device) -> float:
    """Microseconds of one call on the GPU, without what Python takes to start it."""
    with torch.cuda.device(device), torch.no_grad():
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):  # libraries choose their algorithms
                call()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_CALLS):
                call()
        graph.replay()
        times = []
        for _ in range(_REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1000.0 * start.elapsed_time(end) / _CALLS)
    return statistics.median(times)


def example_of(site: Site, shape: tuple[int, ...], *, features_first: bool = False) -> Tensor:
    """Numbers of the shape that a layer is given, where its weights are."""
    device, dtype = site.tensors.weight.device, site.tensors.weight.dtype
    if site.is_convolution:
        x = torch.randn(shape, device=device, dtype=dtype)
        return x if site.tensors.weight.dim() == 4 else x.squeeze(2)
    k, n = site.matrix.k, shape[0]
    sizes = (k, n) if features_first else (n, k)
    x = torch.randn(sizes, device=device, dtype=dtype)
    return x.t() if features_first else x


def _arguments(site: Site, x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """What a layer is called with: a residual too, where it adds one."""
    if not site.adds:
        return (x,)
    return x, torch.randn(convolution_of(site, shape).output_shape(site.matrix.m), device=x.device, dtype=x.dtype)


def dense_micros(site: Site, shape: tuple[int, ...]) -> float:
    """Of a layer before it is swapped."""
    x = example_of(site, shape)
    if site.weight == "weight":
        arguments = _arguments(site, x, shape)
        return micros_of(lambda: site.module.forward(*arguments), x.device)
    tensors = site.tensors
    weight = tensors.weight if tensors.mask is None else tensors.weight * tensors.mask
    return micros_of(lambda: functional.linear(x, weight, tensors.bias), x.device)


def sparse_micros(site: Site, shape: tuple[int, ...], *, fed_first: bool, sharing: int) -> float:
    """Of a layer that is swapped. ``sharing`` layers transpose their one input together."""
    x = example_of(site, shape, features_first=fed_first)
    tuned = site.module.lospmm_tuned
    if site.weight != "weight":
        return micros_of(lambda: product(x, tuned[site.weight], site.tensors), x.device)
    arguments = _arguments(site, x, shape)
    whole = micros_of(lambda: site.module.forward(*arguments), x.device)
    if sharing < 2 or fed_first:
        return whole
    without = example_of(site, shape, features_first=True)
    rest = micros_of(lambda: site.module.forward(without), x.device)
    return rest + (whole - rest) / sharing
