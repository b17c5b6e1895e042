"""Latency of a layer on its GPU, dense and with kernels: its launches, replayed as a CUDA graph.

For a model that will be compiled, layers are timed compiled too, between two elementwise operations: a transpose, or a
change of layout, is then fused with these. ``whole`` times whole models.
"""

import statistics
from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.nn import functional

from lospmm.nn.calling import apart, captured
from lospmm.nn.place import way_of
from lospmm.nn.site import Site, convolution_of

#: Calls in a graph, so many that the graph's launch does not count.
_CALLS = 20

#: Replays; the result is their median.
_REPLAYS = 15

Forward = Callable[..., Tensor]

#: Compiled layers by all that their graphs depend on, to be kept from one timing to the next.
Contexts = dict[Hashable, Forward]


def micros_of(call: Callable[[], object], device: torch.device, calls: int = _CALLS) -> float:
    """Return the microseconds of one call on the GPU alone, from a CUDA graph of ``calls``."""
    with torch.cuda.device(device), torch.no_grad():
        replay = captured(call, device, calls)
        replay()
        times = []
        for _ in range(_REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            end.synchronize()
            times.append(1000.0 * start.elapsed_time(end) / calls)
    return statistics.median(times)


def example_of(site: Site, shape: tuple[int, ...], *, features_first: bool = False) -> Tensor:
    """Return a random input of a layer, on the device and in the type of its weights."""
    device, dtype = site.tensors.weight.device, site.tensors.weight.dtype
    if site.is_convolution:
        x = torch.randn(shape, device=device, dtype=dtype)
        return x if site.tensors.weight.dim() == 4 else x.squeeze(2)
    k, n = site.shape[1], shape[0]
    sizes = (k, n) if features_first else (n, k)
    x = torch.randn(sizes, device=device, dtype=dtype)
    return x.t() if features_first else x


def _residual(site: Site, x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the arguments of a layer after its input: a residual, if it adds one."""
    if not site.adds:
        return ()
    return (torch.randn(convolution_of(site, shape).output_shape(site.shape[0]), device=x.device, dtype=x.dtype),)


def signature(site: Site, shape: tuple[int, ...]) -> Hashable:
    """Return all that a dense layer's latency depends on: layers with the same signature share it."""
    tensors = site.tensors
    parts = tuple(None if one is None else tuple(one.shape) for one in (tensors.weight, tensors.mask, tensors.bias))
    way = way_of(site.module) if site.is_convolution else None
    kind = type(site.module), site.weight, site.relu, site.adds, str(way)
    return kind, parts, shape, tensors.weight.device, tensors.weight.dtype


def dense_micros(site: Site, shape: tuple[int, ...], contexts: Contexts | None = None) -> float:
    """Return the latency of a layer before it is swapped."""
    x = example_of(site, shape)
    forward: Forward = site.module.forward
    if site.weight != "weight":
        tensors = site.tensors
        weight = tensors.weight if tensors.mask is None else tensors.weight * tensors.mask

        def forward(given: Tensor) -> Tensor:
            return functional.linear(given, weight, tensors.bias)

    if contexts is not None:
        forward = _compiled_between(forward)
    arguments = (x, *_residual(site, x, shape))
    return micros_of(lambda: forward(*arguments), x.device)


def sparse_micros(
    site: Site, shape: tuple[int, ...], *, fed_first: bool, sharing: int, contexts: Contexts | None = None
) -> float:
    """Return the latency of a swapped layer; ``sharing`` layers share the transpose of its input."""
    whole = _sparse_micros(site, shape, contexts, fed_first=fed_first)
    if sharing < 2 or fed_first or site.weight != "weight":
        return whole
    rest = _sparse_micros(site, shape, contexts, fed_first=True)
    return rest + (whole - rest) / sharing


def _sparse_micros(site: Site, shape: tuple[int, ...], contexts: Contexts | None, *, fed_first: bool) -> float:
    x = example_of(site, shape, features_first=fed_first)
    tuned, tensors = site.module.lospmm_tuned, site.tensors
    if site.weight != "weight":
        tuned = tuned[site.weight]
    if contexts is None and site.weight == "weight":
        arguments = (x, *_residual(site, x, shape))
        return micros_of(lambda: site.module.forward(*arguments), x.device)
    forward: Forward = site.module.operation()
    if contexts is not None:
        key = signature(site, shape), fed_first, tuned.features_first, tuned.sizes, tuned.inputs
        if key not in contexts:
            contexts[key] = _compiled_between(forward)
        forward = contexts[key]
    given = (x, tensors.weight, tensors.mask, tensors.bias, *_residual(site, x, shape))
    return micros_of(lambda: forward(*given), x.device)


def _compiled_between(forward: Forward) -> Forward:
    """Compile ``forward`` between two elementwise operations, apart from earlier compiled code."""

    def between(x: Tensor, *rest: Tensor) -> Tensor:
        return torch.relu(forward(torch.relu(x), *rest))

    return apart(between)
