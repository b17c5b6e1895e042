"""The ways a pruned network is run in ``benchmarks.networks``, each measured by itself.

Of several processes that measure on one GPU, one at a time has it: the others compile meanwhile.
"""

import copy
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.inference import cusparse, timing
from benchmarks.inference.pruned import Pruned
from benchmarks.inference.timing import Call, Timed
from lospmm.nn.calling import apart
from lospmm.nn.folder import load_, save
from lospmm.nn.fusion import fused
from lospmm.nn.paired import Turns
from lospmm.nn.sparse import Sparse

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Variant:
    """``layers`` is what runs the pruned ones: ``dense``, ``cusparse`` or ``lospmm``; TF32 is for dense products."""

    layers: str
    compiled: bool = False
    precision: str = "float32"  # or TF32 or float16
    memory: str = "fast"

    @property
    def name(self) -> str:
        rest = (one for one in (self.precision, self.memory) if one not in ("float32", "fast"))
        return ", ".join((self.layers, "compiled" if self.compiled else "eager", *rest))


WAYS = (("dense", False), ("dense", True), ("cusparse", False), ("lospmm", False), ("lospmm", True))
VARIANTS = (
    *(Variant(*way) for way in WAYS),
    *(Variant(*way, "TF32") for way in WAYS if way[0] != "cusparse"),
    *(Variant(*way, "float16") for way in WAYS),
    Variant("lospmm", precision="float16", memory="low"),
)


@dataclass(slots=True)
class Bench:
    """A pruned network on a device. The models with kernels are made for how they are called.

    ``alone`` is entered for everything that is timed.
    """

    pruned: Pruned
    device: torch.device
    sparsify: Callable[..., Any]  # of ``lospmm.nn``, with the options of the run
    alone: Callable[[], AbstractContextManager[None]] = nullcontext
    examples: Mapping[int, Tensor] = field(init=False)
    expected: Mapping[int, Tensor] = field(init=False)  # float64, on the CPU

    def __post_init__(self) -> None:
        self.pruned.model.to(self.device)
        self.examples = {count: one.to(self.device) for count, one in self.pruned.examples.items()}
        double = copy.deepcopy(self.pruned.model).double()
        with self.alone(), torch.inference_mode():
            self.expected = {count: double(doubled(one)).cpu() for count, one in self.examples.items()}

    def measure(self, variant: Variant) -> dict[int, Record]:
        """The figures of a variant with each input: times, memory and error. Raises what the variant raises.

        One with kernels is timed in turn with the dense network that is called the same way: ``beside`` in its line.
        """
        with products(tf32=variant.precision == "TF32"), torch.no_grad():
            model, rest = MODELS[variant.layers](self, variant)
            held = {"weight_bytes": timing.weight_bytes(model, self.device), "kernel_bytes": timing.kernel_bytes(model)}
            return {count: self._figures(model, variant, count) | held | rest for count in self.examples}

    def _figures(self, model: nn.Module, variant: Variant, count: int) -> Record:
        example = self.examples[count]
        call = _call(model, variant, example)
        found = call()  # and compile it
        dense = _call(self.pruned.model, variant, example) if variant.layers == "lospmm" else None
        if dense is not None:
            dense()
        with self.alone():
            times = _times(call, dense, self.device)
            return times | errors(found, self.expected[count]) | {"peak_bytes": timing.peak_bytes(call, self.device)}


def _call(model: nn.Module, variant: Variant, example: Tensor) -> Call:
    called = apart(model, fullgraph=True) if variant.compiled else model
    return lambda: called(example)


def dense(bench: Bench, _variant: Variant) -> tuple[nn.Module, Record]:
    return bench.pruned.model, {}


def with_cusparse(bench: Bench, _variant: Variant) -> tuple[nn.Module, Record]:
    model = copy.deepcopy(bench.pruned.model)
    return model, {"left_dense": cusparse.replace(model, dict(bench.pruned.patterns))}


def with_kernels(bench: Bench, variant: Variant) -> tuple[nn.Module, Record]:
    """With TF32 on, a layer has to be faster than its dense product in TF32."""
    model, (example, *others) = for_kernels(bench.pruned.model), bench.examples.values()
    before = copy.deepcopy(model)
    called = "compiled" if variant.compiled else "graph" if others else "eager"
    started = time.monotonic()
    report = bench.sparsify(model, example, called, memory=variant.memory)
    tuned: Record = {"tuning_seconds": round(time.monotonic() - started, 1)}
    tuned |= saved(model, before) if others and report.sparse else {}
    with bench.alone():
        found = layer_errors(model, before, example)
    origins = {name: pattern.origin for name, pattern in bench.pruned.patterns.items()}
    rows = [asdict(row) | {"error": found.get(row.layer), "pattern": origins.get(row.layer)} for row in report.rows]
    return model, {"layers": rows, "whole": None if report.model is None else asdict(report.model)} | tuned


def saved(model: nn.Module, before: nn.Module) -> Record:
    """What saving the kernels and loading them into a dense copy takes, and the most host memory of the process."""
    with tempfile.TemporaryDirectory() as name:
        started = time.monotonic()
        save(model, folder := Path(name, "kernels"))
        loading = time.monotonic()
        loaded = load_(copy.deepcopy(before), folder, emulate=True)
        seconds = {"save_seconds": loading - started, "load_seconds": time.monotonic() - loading}
        size = sum({one.stat().st_ino: one.stat().st_size for one in folder.glob("*/*")}.values())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    rounded = {what: round(one, 2) for what, one in seconds.items()}
    return rounded | {"loaded": len(loaded.sparse), "saved_bytes": size, "host_bytes": most}


def for_kernels(model: nn.Module) -> nn.Module:
    """A copy; convolutions with the additions and ReLUs behind them, which a kernel does before it stores."""
    convolves = any(isinstance(module, nn.Conv2d) for module in model.modules())
    return fused(model) if convolves else copy.deepcopy(model)


def layer_errors(model: nn.Module, before: nn.Module, example: Tensor) -> dict[str, float]:
    """Of each layer with kernels, for its own inputs in the network: the greatest error against float64.

    ``before`` is the model before it was given kernels. Errors are relative to the layer's greatest output.
    """
    found: dict[str, float] = {}

    def compare(name: str) -> Callable[..., None]:
        def hear(_layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            double = copy.deepcopy(before.get_submodule(name)).double()
            found[name] = errors(output, double(*map(doubled, given)).cpu())["greatest_error"]

        return hear

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, Sparse):
                stack.callback(module.register_forward_hook(compare(name)).remove)
        with torch.no_grad():
            model(example)
    return found


def doubled(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


#: Who makes the model of a variant, by its ``layers``, and what its line has besides.
MODELS: Mapping[str, Callable[[Bench, Variant], tuple[nn.Module, Record]]] = MappingProxyType(
    {"dense": dense, "cusparse": with_cusparse, "lospmm": with_kernels}
)


@contextmanager
def products(*, tf32: bool) -> Iterator[None]:
    """Dense products and convolutions in TF32 or in full float32; cuDNN chooses its algorithms by timing them."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = tf32, True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before[1:]


def errors(found: Tensor, expected: Tensor) -> Record:
    """Against float64: the greatest error relative to the greatest output, and the norm of all relative to the norm."""
    difference = found.detach().double().cpu() - expected
    return {
        "greatest_error": float(difference.abs().max() / expected.abs().max()),
        "error": float(difference.norm() / expected.norm()),
    }


def _times(call: Call, dense: Call | None, device: torch.device) -> Record:
    """As called, and as graphs; a network that cannot be captured has the reason in its line."""
    found, beside = _timed(call, dense, device)
    record: Record = {"micros": found.micros, "noise": found.noise, "graph_micros": None, "graph_noise": None}
    if beside is not None:
        record["beside"] = {"called": asdict(beside), "graph": None}
    try:
        graph, dense_graph = (None if one is None else timing.as_graph(one, device) for one in (call, dense))
    except RuntimeError as error:
        with suppress(RuntimeError):
            torch.cuda.synchronize(device)
        return record | {"graph_failure": " ".join(str(error).split())[:200]}
    if graph is not None:
        found, beside = _timed(graph, dense_graph, device)
        record |= {"graph_micros": found.micros, "graph_noise": found.noise}
        if beside is not None:
            record["beside"]["graph"] = asdict(beside)
    return record


def _timed(call: Call, dense: Call | None, device: torch.device) -> tuple[Timed, Turns | None]:
    if dense is None:
        return timing.timed(call, device), None
    turns = timing.timed_in_turn(dense, call, device)
    return Timed(turns.second_micros, turns.noise / turns.ratio), turns
