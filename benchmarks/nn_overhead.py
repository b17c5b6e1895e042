"""What PyTorch's operator costs over the bare launch of its kernel, and where layers win and lose (docs/pytorch.md).

    python -m benchmarks.nn_overhead [--out DIR] [--tokens N] [--measure auto|none] [--without-compiler]

needs an NVIDIA GPU of the device table and PyTorch. First the time that Python takes for one call, of a kernel so small
that the GPU waits for it: the launch alone, the operator, a whole layer, and a dense layer; then the time of a call
within a CUDA graph. Then the layers of a Transformer block at 91 %, each timed whole, dense and with its kernel, and
the block end to end, eager and compiled, with TF32 off and on. With ``--measure none`` kernels are chosen by the
estimate, which takes seconds, not minutes. Writes ``nn_overhead.jsonl``.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

import lospmm.nn
from lospmm.gpu.detect import detect_device
from lospmm.nn import bound, operator, transpose
from lospmm.nn.timing import micros_of

SIZE, COLUMNS = 256, 128  # of the small kernel
HIDDEN, WIDE = 768, 3072  # of BERT-base
SPARSITY = 0.91
CALLS, REPEATS = 1000, 9

#: Kernels chosen by the estimate; what they compute is compared here.
UNTIMED: Mapping[str, Any] = MappingProxyType({"measure": "none", "verify": "none"})


def python_micros(ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """What one of many calls takes each way, the best of ``REPEATS`` by turns: others here only ever add to it."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(REPEATS):
        for way, call in ways.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[way] = min(best[way], 1e6 * (time.perf_counter() - start) / CALLS)
    torch.cuda.synchronize()
    return best


def pruned(*layers: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*layers).cuda().eval()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            prune.l1_unstructured(module, "weight", SPARSITY)
            prune.remove(module, "weight")
    return model


def overhead() -> Iterator[dict[str, Any]]:
    """Microseconds of a call, each way."""
    model = pruned(nn.Linear(SIZE, SIZE))
    layer = model[0]
    x = torch.randn(COLUMNS, SIZE, device="cuda")
    dense = copy.deepcopy(layer)
    lospmm.nn.sparsify_(model, x, choice="sparse", **UNTIMED)
    b, weight, bias = x.t().contiguous(), layer.weight.detach(), layer.bias.detach()
    found = bound.find(bound.address_of(weight, None, bias))
    assert found is not None and found.refusal is None
    (ready,) = found.ready.values()
    assert ready.launcher is not None
    c = torch.empty(ready.out_shape, device="cuda")
    launch, stream = ready.launcher, torch.cuda.current_stream().cuda_stream
    at_b, at_c = b.data_ptr(), c.data_ptr()
    ways: dict[str, Callable[[], object]] = {
        "launch alone": lambda: launch(stream, at_b, at_c),
        "operator": lambda: operator.spmm(b, weight, None, bias, None, False),
        "layer": lambda: layer(x),
        "dense layer": lambda: dense(x),
    }
    yield {"what": "python", "micros": python_micros(ways)}
    with torch.inference_mode():
        yield {"what": "python, inference mode", "micros": python_micros(ways)}
    # What is captured is what is launched on the stream of the capture.
    ways["launch alone"] = lambda: launch(torch.cuda.current_stream().cuda_stream, at_b, at_c)
    yield {"what": "CUDA graph", "micros": {way: micros_of(call, b.device) for way, call in ways.items()}}


def transposes(tokens: int) -> Iterator[dict[str, Any]]:
    """Of activations, by this package and by PyTorch."""
    for features in (HIDDEN, WIDE):
        x = torch.randn(tokens, features, device="cuda")
        ours = micros_of(lambda x=x: transpose.transposed(x), x.device)
        theirs = micros_of(lambda x=x: x.t().contiguous(), x.device)
        yield {"what": f"transpose of {tokens} x {features}", "micros": {"lospmm": ours, "PyTorch": theirs}}


def layers(tokens: int, measure: str, *, compiles: bool) -> Iterator[dict[str, Any]]:
    """A block's products, dense and sparse, and where the GPU's time goes."""
    x = torch.randn(tokens, HIDDEN, device="cuda")
    options = UNTIMED if measure == "none" else {}
    blocks = {
        "feed-forward": lambda: pruned(nn.Linear(HIDDEN, WIDE), nn.GELU(), nn.Linear(WIDE, HIDDEN)),
        "projection": lambda: pruned(nn.Linear(HIDDEN, HIDDEN)),
    }
    for name, make in blocks.items():
        for tf32 in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.manual_seed(0)
            model = make()
            eager = micros_of(lambda model=model: model(x), x.device)
            compiled = micros_of(_compiled(model, x), x.device) if compiles else None
            wanted = _double(model, x)
            report = lospmm.nn.sparsify_(model, x, choice="sparse", **options)
            ours = micros_of(lambda model=model: model(x), x.device)
            ours_compiled = micros_of(_compiled(model, x), x.device) if compiles else None
            with torch.no_grad():
                error = float((model(x).double() - wanted).abs().max() / wanted.abs().max())
            measured = lospmm.nn.sparsify_(model, x, **options)
            chosen = micros_of(lambda model=model: model(x), x.device)
            yield {
                "what": name,
                "tf32": tf32,
                "micros": {
                    "dense": eager,
                    "dense, compiled": compiled,
                    "sparse": ours,
                    "sparse, compiled": ours_compiled,
                    "chosen by layer": chosen,
                },
                "kernels": [row.kernel_micros for row in report.rows],
                "rows": [asdict(row) for row in measured.rows],
                "error": error,
            }


def _compiled(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)
        compiled(x)
    return lambda: compiled(x)


def _double(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        wanted: torch.Tensor = model.double()(x.double())
    model.float()
    return wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--measure", choices=("auto", "none"), default="auto")
    parser.add_argument("--without-compiler", action="store_true")
    chosen = parser.parse_args()
    device = detect_device().name
    chosen.out.mkdir(parents=True, exist_ok=True)
    torch.set_grad_enabled(False)
    with (chosen.out / "nn_overhead.jsonl").open("w") as file:
        parts = (
            overhead(),
            transposes(chosen.tokens),
            layers(chosen.tokens, chosen.measure, compiles=not chosen.without_compiler),
        )
        for part in parts:
            for row in part:
                line = {"device": device, "torch": torch.__version__, **row}
                file.write(f"{json.dumps(line)}\n")
                file.flush()
                tf32 = f", TF32 {'on' if row['tf32'] else 'off'}" if "tf32" in row else ""
                print(f"{row['what']}{tf32}")
                for way, micros in row["micros"].items():
                    print(f"    {way:<28}" + ("-" if micros is None else f"{micros:>9.2f} us"), flush=True)
                if "kernels" in row:
                    print(f"    kernels alone: {row['kernels']}; error {row['error']:.1e}")


if __name__ == "__main__":
    main()
