"""Layers of language models, A from memory: the fastest kernel beside cuBLAS's fastest algorithm (docs/results.md).

    python -m benchmarks.decode [--n N]... [--sparsity SHARE]... [--dtype TYPE]... [--only TEXT] [--plans COUNT]
                                [--memory fast|low] [--values TYPE] [--stop-after SECONDS] [--workers COUNT]
                                [--commit TEXT] [--out DIR]

Every family is built, checked and timed as by ``benchmarks.families``, in a CUDA graph whose copies of A, B and C are
four times the L2 cache. A line of ``decode.jsonl`` has a problem's fastest kernel; of what the file has for this GPU
nothing is timed again. ``of_roof`` is the time that the least bytes take at the published bandwidth, over the
kernel's: 16 bits of each nonzero, a bit of each element of A, and B and C. ``bytes`` is the kernel's file, A in it.
With ``--memory low``, ``decode_low.jsonl`` has kernels that read A alike at every N, and with ``--values TYPE``,
``decode_TYPE.jsonl`` kernels whose A has 8 bits a value.
Of other products: from N 8 on cuSPARSELt's, of A pruned to 2:4; with ``--values`` cuBLASLt's, of a B of 8 bits too.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.families import context_of, key_of, line_of, measure
from benchmarks.families_build import Prepared, Shortlist
from benchmarks.families_cases import Case
from benchmarks.families_table import Record, best_sparse, coded_micros, dense_micros, mean, pruned_micros, read_results
from benchmarks.kernels import ROOT, commit_of
from lospmm.errors import BadRequest, GpuFault
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device
from lospmm.problem.device import find_device
from lospmm.problem.values import VALUE_TYPES

SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (8192, 8192), (28672, 8192))
SPARSITIES = (0.5, 0.6, 0.7, 0.8)
COLUMNS = (1, 8, 16, 32, 64, 2, 4, 128, 512, 4096)  # what is asked of first

#: As in ``benchmarks.families``, but few forecasts here are wrong by so much.
FAR = 2.0

#: Of the line of ``benchmarks.families``, what nobody asks for here.
LEFT_OUT = ("traits", "refused", "bound_micros", "bound_by")


def cases_of(device: str, columns: Sequence[int], sparsities: Sequence[float], dtypes: Sequence[str]) -> list[Case]:
    """The problems, those of all shapes at one N and sparsity together."""
    return [
        Case("decode", f"{m} x {k}, {sparsity:.0%} zeros", (m, k, sparsity), n, dtype, device)
        for dtype in dtypes
        for n in columns
        for sparsity in sparsities
        for m, k in SHAPES
    ]


def line(case: Case, context: Mapping[str, Any], prepared: Prepared, bench: Bench, *, beside: bool = True) -> Record:
    """Return the line of ``benchmarks.families``, and what is told of the fastest kernel."""
    sizes = {
        (one.family, one.plan): one.kernel.cubin.stat().st_size for one in prepared.built if one.kernel is not None
    }
    record = line_of(case, context, prepared, bench, beside=beside)
    if (best := best_sparse(record)) is not None:
        family, micros = best
        own = {"family": family, "micros": micros, "of_roof": round(least_micros(record) / micros, 3)}
        record |= own | {"bytes": sizes[family, record["families"][family]["plan"]]}
    for found in record["families"].values():
        del found["plans"]
        found.pop("brief", None)
        found.pop("tried", None)
    return {name: value for name, value in record.items() if name not in LEFT_OUT}


def least_micros(record: Record) -> float:
    """The roof: the least bytes at the published bandwidth."""
    return least_bytes(record) / find_device(record["machine"]["device"]).memory_bandwidth * 1e6


def least_bytes(record: Record) -> float:
    """Two bytes of each nonzero and a bit of each element of A, with B and C."""
    m, k, n, nnz = (record[name] for name in ("m", "k", "n", "nnz"))
    return float(2 * nnz + m * k / 8 + 2 * n * (k + m))


def by_gpu(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The lines of each GPU, by its title."""
    titles = sorted({record["machine"]["title"] for record in records})
    return {title: [record for record in records if record["machine"]["title"] == title] for title in titles}


def groups(records: Sequence[Record], n: int) -> dict[float, list[Record]]:
    """The lines of an N by sparsity."""
    found: dict[float, list[Record]] = {}
    for record in records:
        if record["n"] == n and best_sparse(record) is not None:
            found.setdefault(round(record["sparsity"], 2), []).append(record)
    return dict(sorted(found.items()))


def gains(records: Sequence[Record], of: Callable[[Record], float | None] = dense_micros) -> list[float]:
    """How many times as fast as cuBLAS each is, or as another library."""
    return [micros / record["micros"] for record in records if (micros := of(record)) is not None]


def summary(records: Sequence[Record]) -> str:
    """Geometric means over the shapes, by GPU, type, N and sparsity, and the families that were the fastest."""
    lines = []
    for title, of_gpu in by_gpu(records).items():
        for dtype, n in product(dict.fromkeys(record["dtype"] for record in of_gpu), sorted(COLUMNS)):
            for zeros, own in groups([one for one in of_gpu if one["dtype"] == dtype], n).items():
                share = mean([record["of_roof"] for record in own])
                means = [f"{share:.2f} of the roof", f"{mean(gains(own)):.2f}x cuBLAS"]
                for title_of, of in (("cuSPARSELt", pruned_micros), ("cuBLASLt of 8 bits", coded_micros)):
                    means += [f"{mean(found):.2f}x {title_of}"] if (found := gains(own, of)) else []
                shapes = f"({len(own)} shapes: {', '.join(sorted({record['family'] for record in own}))})"
                lines.append(f"{title}, {dtype}, N {n:>4}, {zeros:.0%} zeros: {', '.join(means)} {shapes}")
    return "\n".join(lines)


def plot(records: Sequence[Record], path: Path) -> None:
    """Speed-up over cuBLAS by N, a line for each sparsity, a panel for each GPU."""
    gpus = by_gpu(records)
    figure, panels = plt.subplots(1, len(gpus), figsize=(5 * len(gpus), 4), sharey=True, squeeze=False)
    for panel, (title, own) in zip(panels[0], gpus.items(), strict=True):
        columns = sorted({record["n"] for record in own})
        for zeros in sorted({round(record["sparsity"], 2) for record in own}):
            found = [(n, mean(gains(some))) for n in columns if (some := groups(own, n).get(zeros))]
            panel.plot(*zip(*found, strict=True), marker="o", label=f"{zeros:.0%} zeros")
        panel.axhline(1.0, color="0.6", linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_xticks(columns, [str(n) for n in columns])
        panel.set(title=title, xlabel="columns of B")
    panels[0, 0].set_ylabel("times as fast as cuBLAS")
    panels[0, 0].legend()
    figure.suptitle("Layers of language models, float16")
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, action="append", help="may be given more than once, as the next two")
    parser.add_argument("--sparsity", type=float, action="append")
    parser.add_argument("--dtype", action="append", choices=("float16", "bfloat16"))
    parser.add_argument("--only", default="", metavar="TEXT", help="problems whose name has it")
    parser.add_argument("--plans", type=int, default=3, metavar="COUNT", help="of each family")
    parser.add_argument("--memory", choices=("fast", "low"), default="fast")
    parser.add_argument("--values", choices=("dtype", *VALUE_TYPES), default="dtype")
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--workers", type=int, default=min(8, len(os.sched_getaffinity(0))), metavar="COUNT")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    kind = [one for one in (arguments.memory, arguments.values) if one not in ("fast", "dtype")]
    path = arguments.out / f"{'_'.join(['decode', *kind])}.jsonl"
    try:
        device, results = detect_device(), read_results(path)
        context = context_of(device, arguments.commit or commit_of(ROOT))
        asked = arguments.n or COLUMNS, arguments.sparsity or SPARSITIES, arguments.dtype or ("float16",)
        cases = [
            case
            for case in cases_of(device.name, *asked)
            if arguments.only in case.problem and key_of(case, context) not in results
        ]
        shortlist = Shortlist(arguments.plans, FAR, memory=arguments.memory, values=arguments.values)
        done = measure(
            cases,
            context,
            path,
            shortlist=shortlist,
            workers=arguments.workers,
            results=results,
            stop_after=arguments.stop_after,
            line=line,
        )
    except (BadRequest, GpuFault, OSError) as error:
        sys.exit(f"benchmarks.decode: {error}")
    found = list(results.values())
    print(summary(found))
    if not kind and (half := [one for one in found if one["dtype"] == "float16" and "micros" in one]):
        plot(half, path.with_suffix(".png"))
    if done < len(cases):
        print(f"{len(cases) - done} problems are left: the same command goes on", file=sys.stderr)


if __name__ == "__main__":
    main()
