"""How long a call takes, as it is called and as the replay of a CUDA graph, and how much memory."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lospmm.nn.calling import captured
from lospmm.nn.paired import Block, Turns, in_turn, uncollected
from lospmm.nn.sparse import Sparse

Call = Callable[[], Any]

#: A block of calls is timed as a whole, so that the events' own cost does not count.
BLOCKS = {"cuda": 11, "cpu": 2}
LEAST_BLOCK_MICROS = 20_000.0
MOST_CALLS = 200

#: Before anything is timed: compiling, choosing algorithms, allocating.
WARM_UP_CALLS = {"cuda": 3, "cpu": 1}


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds of one call: the median of the blocks, and their interquartile range relative to it."""

    micros: float
    noise: float


def timed(call: Call, device: torch.device) -> Timed:
    """Calls one after the other, as fast as they can be made."""
    block = block_of(call, device)
    with uncollected():
        micros = [block() for _ in range(BLOCKS[device.type])]
    low, middle, high = statistics.quantiles(micros, n=4, method="inclusive")
    return Timed(middle, (high - low) / middle)


def timed_in_turn(first: Call, second: Call, device: torch.device) -> Turns:
    """Blocks of the one and of the other, so that what disturbs the machine disturbs both."""
    blocks = block_of(first, device), block_of(second, device)
    with uncollected():
        return in_turn(*blocks, BLOCKS[device.type])


def block_of(call: Call, device: torch.device) -> Block:
    """So many calls that a block takes long enough; each block begins with one that is not timed."""
    for _ in range(WARM_UP_CALLS[device.type]):
        call()
    once = _block_micros(call, 1, device)
    calls = max(1, min(MOST_CALLS, round(LEAST_BLOCK_MICROS / max(once, 1.0))))

    def block() -> float:
        call()
        return _block_micros(call, calls, device) / calls

    return block


def as_graph(call: Call, device: torch.device) -> Call | None:
    """The same without what calling costs; None where there is no GPU. Raises what the capture raises."""
    return captured(call, device) if device.type == "cuda" else None


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """What a call takes besides what was allocated before it: activations and workspaces of PyTorch's allocator."""
    if device.type != "cuda":
        return None
    call()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def kernel_bytes(model: nn.Module) -> int:
    """Of the files of kernels, with A and code; kernels in one file count once."""
    states = [module.lospmm_state for module in model.modules() if isinstance(module, Sparse)]
    kernels = [one.kernel for state in states for tuned in state.tuned.values() for one in tuned.buckets]
    return sum({one.artifact.manifest["cubin_sha256"]: len(one.cubin) for one in kernels}.values())


def weight_bytes(model: nn.Module, device: torch.device) -> int:
    """Of parameters, buffers and sparse weights on the device."""
    tensors = [one for one in (*model.parameters(), *model.buffers()) if one.device.type == device.type]
    total = sum(one.numel() * one.element_size() for one in tensors)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.layout is torch.sparse_csr:
            parts = (weight.crow_indices(), weight.col_indices(), weight.values())
            total += sum(one.numel() * one.element_size() for one in parts)
    return total


def _block_micros(call: Call, calls: int, device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - started) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3
