"""Whole pruned networks on their kernels, beside PyTorch and cuSPARSE (sections 6.2 and 7.4).

    python -m benchmarks.networks [--case NAME]... [--layers DIR] [--out DIR] [--batch COUNT] [--variant NAME]...
                                  [--measure auto|gpu|none] [--budget-seconds SECONDS] [--stop-after SECONDS] [--toy]

needs PyTorch and an NVIDIA GPU of the device table. The cases: BERT-base with 91 % zeros, ResNet-50 with 90 and 95 %,
MobileNetV2 with 90 %, in float32, weights random, no batch norms (they are folded), batch 32. ``--layers`` names a
folder with DLMC's and SparseRT's patterns, which ResNet-50 has where a shape fits; each layer's line says which.

Every variant (dense, torch.sparse, ``lospmm.nn``; eager and compiled; TF32 off and on) has a line in ``networks.jsonl``
as soon as it is measured, in place of its former one: microseconds as called and as a CUDA graph, memory, the error
against float64, and with kernels the table of the layers. One that fails has a line that says why. ``--toy`` runs small
networks, on a CPU where there is no GPU, and is there for tests. Exits 1 if a variant failed.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from benchmarks import harness
from benchmarks.inference.ahead import Way, gpu_alone, options_of, sparsify
from benchmarks.inference.pruned import CASES, Case, Pruned, build
from benchmarks.inference.variants import VARIANTS, Bench, Variant
from benchmarks.kernels import commit_of, context_of
from benchmarks.networks_report import Record, plot, promises, table
from lospmm.errors import BadRequest, LospmmError
from lospmm.gpu.detect import detect_device
from lospmm.problem.device import find_device
from lospmm_datasets.networks import RealPattern, real_patterns

ROOT = Path(__file__).parents[1]
RESULTS_NAME = "networks.jsonl"
BATCH = 32

#: What a toy is tuned for, where there is no GPU: its kernels run emulated.
TOY_DEVICE = "h200"


def key(line: Record) -> tuple[str, ...]:
    """What a line is about: of two with the same key, the later counts."""
    return line["case"], line["variant"], line["machine"]["device"], str(line["batch"])


def read_results(path: Path) -> dict[tuple[str, ...], Record]:
    """Raises BadRequest for what is no such file."""
    return harness.read_results(path, key)


def write_line(path: Path, line: Record) -> None:
    """Put it into the file at once."""
    results = read_results(path)
    results.pop(key(line), None)
    harness.write_lines(path, [*results.values(), line])


def line_of(bench: Bench, variant: Variant) -> Record:
    """The figures of a variant, or why there are none: what one does is not the others' loss."""
    started = time.monotonic()
    try:
        found = bench.measure(variant)
    except Exception as error:  # of PyTorch, its compiler and ours
        found = {"failure": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
    for layer in found.get("layers", ()):
        pattern = bench.pruned.patterns.get(layer["layer"])
        layer["pattern"] = None if pattern is None else pattern.origin
    return {**found, "wall_seconds": round(time.monotonic() - started, 1)}


def heads(case: Case, pruned: Pruned, batch: int, *, toy: bool) -> Record:
    return {
        "case": f"toy {case.name}" if toy else case.name,
        "network": case.network,
        "patterns": case.origin,
        "sparsity": round(pruned.sparsity, 4),
        "pruned_layers": len(pruned.patterns),
        "batch": batch,
    }


def chosen(cases: Sequence[Case], names: Sequence[str] | None) -> list[Case]:
    return [case for case in cases if not names or case.name in names]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--variant", action="append", choices=[variant.name for variant in VARIANTS])
    parser.add_argument("--layers", type=Path, help="a folder of real patterns")
    parser.add_argument("--out", type=Path, help="by default benchmarks/results; with --toy build/toy")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--measure", default="auto", help="whether tuning times candidates")
    parser.add_argument("--budget-seconds", type=float, metavar="SECONDS", help="of tuning one layer")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="begin no variant after that")
    parser.add_argument("--toy", action="store_true", help="small networks, for tests")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    arguments = parser.parse_args(words)
    plt.switch_backend("agg")
    try:
        return run(arguments)
    except (LospmmError, OSError) as error:
        print(f"benchmarks.networks: {error}", file=sys.stderr)
        return 2


def run(arguments: argparse.Namespace) -> int:
    """Measure what was asked for; print the table, what was promised, and draw the plot. Gives the exit code."""
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not arguments.toy:
        raise BadRequest("PyTorch finds no GPU on this machine; --toy runs small networks on the CPU")
    where = torch.device("cuda" if on_gpu else "cpu")
    device = detect_device() if on_gpu else find_device(TOY_DEVICE)
    options = options_of(arguments.measure, arguments.budget_seconds)
    context = context_of(device, options, arguments.commit or commit_of(ROOT))
    context["versions"]["torch"] = torch.__version__
    found = real_patterns(arguments.layers) if arguments.layers is not None else ()
    variants = [variant for variant in VARIANTS if not arguments.variant or variant.name in arguments.variant]
    way = Way(device, options, gpu_alone() if on_gpu else None)
    out = arguments.out or ROOT / ("build/toy" if arguments.toy else "benchmarks/results")
    path, lines, started = out / RESULTS_NAME, [], time.monotonic()
    for case in chosen(CASES, arguments.case):
        pruned, bench = None, None
        for variant in variants:
            if arguments.stop_after is not None and time.monotonic() - started > arguments.stop_after:
                print(f"{case.name}, {variant.name}: not begun", file=sys.stderr)
                continue
            if pruned is None or bench is None:
                pruned = build_case(case, arguments, found)
                bench = Bench(pruned, where, partial(sparsify, way=way), way.alone or nullcontext)
            line = {
                **heads(case, pruned, arguments.batch, toy=arguments.toy),
                "variant": variant.name,
                **context,
                **line_of(bench, variant),
            }
            write_line(path, line)
            lines.append(line)
            print(table([line]).splitlines()[1], f"({line['wall_seconds']} s)", flush=True)
    print(table(lines), promises(lines), sep="\n\n")
    plot(list(read_results(path).values()), path.with_suffix(".png"))
    return int(any("failure" in line for line in lines))


def build_case(case: Case, arguments: argparse.Namespace, found: Sequence[RealPattern]) -> Pruned:
    return build(case.toy if arguments.toy else case.full, case, arguments.batch, found)


if __name__ == "__main__":
    sys.exit(main())
