"""Whole pruned networks on their kernels, beside PyTorch and cuSPARSE (sections 6.2 and 7.4).

    python -m benchmarks.networks [--case NAME]... [--layers DIR] [--out DIR] [--batch COUNT] [--variant NAME]...
                                  [--dtype float32|float16] [--measure auto|gpu|none] [--budget-seconds SECONDS]
                                  [--decoders COUNT] [--resume] [--stop-after SECONDS] [--toy]

needs PyTorch and an NVIDIA GPU of the device table. The cases: BERT-base with 91 % zeros, ResNet-50 with 90 and 95 %,
MobileNetV2 with 90 %, weights random, no batch norms (they are folded), batch 32; in float16 also a layer of Llama-2-7B
with 70 %, or ``--decoders`` of them, whose one model runs 1, 8 and 512 tokens. ``--layers`` names a folder with DLMC's
and SparseRT's patterns, which ResNet-50 has where a shape fits; each layer's line says which.

Every variant (dense, torch.sparse, ``lospmm.nn``; eager and compiled; TF32 off and on) has a line in ``networks.jsonl``
as soon as it is measured, in place of its former one: microseconds as called and as a CUDA graph, memory, the error
against float64, and with kernels the table of the layers. One that fails has a line that says why; ``--resume`` leaves
out what has a line. ``--toy`` runs small networks, on a CPU too, for tests. Exits 1 if a variant failed.
"""

import argparse
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from benchmarks import harness
from benchmarks.inference.ahead import Way, gpu_alone, options_of, sparsify
from benchmarks.inference.pruned import CASES, Case, build
from benchmarks.inference.variants import VARIANTS, Bench, Variant
from benchmarks.kernels import commit_of, context_of
from benchmarks.networks_report import Record, plot, speedups, table
from lospmm.errors import BadRequest, LospmmError
from lospmm.gpu.detect import detect_device
from lospmm.problem.device import find_device
from lospmm_datasets.networks import real_patterns

ROOT = Path(__file__).parents[1]
RESULTS_NAME = "networks.jsonl"
BATCH = 32

#: What a toy is tuned for, where there is no GPU: its kernels run emulated.
TOY_DEVICE = "h200"


def key(line: Record) -> tuple[str, ...]:
    """What a line is about: of two with the same key, the later counts."""
    return line["case"], line["variant"], line["machine"]["device"], str(line["batch"])


def lines_of(bench: Bench, variant: Variant) -> list[Record]:
    """The figures of a variant, or why there are none: what one does is not the others' loss."""
    started = time.monotonic()
    try:
        found = bench.measure(variant)
    except Exception as error:  # of PyTorch, its compiler and ours
        failure = {"failure": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
        found = dict.fromkeys(bench.examples, failure)
    seconds = round(time.monotonic() - started, 1)
    return [{"batch": batch, **one, "wall_seconds": seconds} for batch, one in found.items()]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--variant", action="append", choices=[variant.name for variant in VARIANTS])
    parser.add_argument("--layers", type=Path, help="a folder of real patterns")
    parser.add_argument("--out", type=Path, help="by default benchmarks/results; with --toy build/toy")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    parser.add_argument("--measure", default="auto", help="whether tuning times candidates")
    parser.add_argument("--budget-seconds", type=float, metavar="SECONDS", help="of tuning one layer")
    parser.add_argument("--decoders", type=int, default=1, help="layers of the language model")
    parser.add_argument("--resume", action="store_true", help="leave out what has a line for this GPU")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds, after which no variant begins")
    parser.add_argument("--toy", action="store_true", help="small networks, for tests")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    arguments = parser.parse_args(words)
    plt.switch_backend("agg")
    try:
        return run(arguments)
    except (LospmmError, OSError) as error:
        print(f"benchmarks.networks: {error}", file=sys.stderr)
        return 2


def asked(case: Case, arguments: argparse.Namespace, done: Collection[tuple[str, ...]], device: str) -> list[Variant]:
    """The variants of a case to measure. One by tokens has float16 alone, and one copy of the weights as well."""
    is_half, batches = arguments.dtype == "float16", case.tokens or (arguments.batch,)
    if (case.tokens and not is_half) or (arguments.case and case.name not in arguments.case):
        return []
    return [
        one
        for one in VARIANTS
        if (one.precision == "float16") == is_half and (case.tokens or one.memory == "fast")
        if not arguments.variant or one.name in arguments.variant
        if not {(title(case, arguments), one.name, device, str(batch)) for batch in batches}.issubset(done)
    ]


def title(case: Case, arguments: argparse.Namespace) -> str:
    name = f"{case.name}, {arguments.decoders} of them" if case.tokens and arguments.decoders > 1 else case.name
    return f"toy {name}" if arguments.toy else name


def run(arguments: argparse.Namespace) -> int:
    """Measure what was asked for; print the table and the speedups, and draw the plot. Gives the exit code."""
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not arguments.toy:
        raise BadRequest("PyTorch finds no GPU on this machine; --toy runs small networks on the CPU")
    where = torch.device("cuda" if on_gpu else "cpu")
    device = detect_device() if on_gpu else find_device(TOY_DEVICE)
    options = replace(options_of(arguments.measure, arguments.budget_seconds), dtype=arguments.dtype)
    context = context_of(device, options, arguments.commit or commit_of(ROOT))
    context["versions"]["torch"] = torch.__version__
    found = real_patterns(arguments.layers) if arguments.layers is not None else ()
    way = Way(device, options, gpu_alone() if on_gpu else None)
    out = arguments.out or ROOT / ("build/toy" if arguments.toy else "benchmarks/results")
    path, lines, end = out / RESULTS_NAME, [], time.monotonic() + arguments.stop_after
    results = harness.read_results(path, key)
    done = [name for name, line in results.items() if arguments.resume and "failure" not in line]
    for case in CASES:
        bench = None
        for variant in asked(case, arguments, done, device.name):
            if time.monotonic() > end:
                print(f"{case.name}, {variant.name}: not begun", file=sys.stderr)
                continue
            if bench is None:
                setup, dtype = case.toy if arguments.toy else case.full, getattr(torch, arguments.dtype)
                setup = setup.repeated(arguments.decoders) if case.tokens else setup
                pruned = build(setup, case, arguments.batch, found, dtype)
                bench = Bench(pruned, where, partial(sparsify, way=way, n=case.tokens), way.alone or nullcontext)
            heads = {
                "case": title(case, arguments),
                "network": case.network,
                "patterns": case.origin,
                "sparsity": round(bench.pruned.sparsity, 4),
                "pruned_layers": len(bench.pruned.patterns),
                "variant": variant.name,
            }
            for figures in lines_of(bench, variant):
                lines.append(heads | context | figures)
                results.pop(key(lines[-1]), None)
                results[key(lines[-1])] = lines[-1]
                harness.write_results(path, results)
                print(table(lines[-1:]).splitlines()[1], f"({figures['wall_seconds']} s)", flush=True)
    print(table(lines), speedups(lines), sep="\n\n")
    plot(list(results.values()), path.with_suffix(".png"))
    return int(any("failure" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
