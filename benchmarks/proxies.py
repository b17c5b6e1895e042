"""Section 5: how much less code the proxies of a search space are than its kernels, and how much sooner compiled.

    python -m benchmarks.proxies [--out DIR]

writes ``proxies.jsonl``, one record a line, and ``proxies.png``. A record with ``"measure": "code"`` is one M1 of one
layer: the instructions of all kernels with this M1, of one of them, and of the proxy. ``"ptx"`` has the bytes of their
text, for the first layer; ``"seconds"`` what compilers took for one kernel and its proxy, for a sample of M1.
"""

import argparse
import itertools
import json
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from lospmm.codegen import emit
from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import lower
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.explore import explore
from lospmm.space.reorder import regroup
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm_datasets.synthetic import uniform
from lospmm_proxies import proxies
from lospmm_proxies.loops import kept_share
from lospmm_proxies.trial import ProxyKernel

Record = dict[str, Any]

DEVICE = DEVICES["h200"]
COLUMNS = 4096
#: (m, k, sparsity). The others are there for what the first does not reach: many tiles, and long loops.
LAYERS = [(768, 768, 0.9), (3072, 768, 0.7), (768, 3072, 0.7)]
SAMPLES = 6
LANGUAGES = {"ptx": "ptxas", "cuda": "nvcc"}


def trials_by_rows(problem: Problem) -> dict[int, list[ProxyKernel]]:
    """The proxies of every tile size that the constraints leave, by M1; those of one M1 share one program."""
    workers = len(os.sched_getaffinity(0))
    space = explore(problem, lambda limits: regroup(problem.matrix, limits, workers=workers))
    trials = sorted(proxies(problem, space.survivors), key=lambda trial: trial.candidate.tile)
    return {rows: list(group) for rows, group in itertools.groupby(trials, key=lambda trial: trial.candidate.tile.rows)}


def measure_code(problem: Problem, layer: str, by_rows: dict[int, list[ProxyKernel]]) -> Iterator[Record]:
    for rows, trials in by_rows.items():
        tiling, proxy = trials[0].candidate.tiling, trials[0].program
        kernel = int(tiling.nnc.sum()) + problem.matrix.nnz + problem.matrix.m
        yield {
            "measure": "code",
            "layer": layer,
            "m1": rows,
            "kernels": len(trials),
            "kernels_instructions": len(trials) * kernel,
            "kernel_instructions": kernel,
            "proxy_instructions": sum(len(block.code) for block in proxy.tiles),
            "tiles": len(tiling.tiles),
            "proxy_blocks": len(proxy.tiles),
            "kept_loads": round(kept_share(trials[0]), 3),
        }


def measure_ptx(problem: Problem, layer: str, by_rows: dict[int, list[ProxyKernel]]) -> Iterator[Record]:
    """Bytes of text. Kernels that differ in N1 alone differ by a few digits, so one of each M1 is emitted."""
    for rows, trials in by_rows.items():
        kernel, proxy = (
            len(emit(program, "ptx", DEVICE.arch).source)
            for program in (lower(problem, trials[0].candidate), trials[0].program)
        )
        yield {
            "measure": "ptx",
            "layer": layer,
            "m1": rows,
            "kernels_bytes": len(trials) * kernel,
            "kernel_bytes": kernel,
            "proxy_bytes": proxy,
        }


def measure_seconds(problem: Problem, layer: str, by_rows: dict[int, list[ProxyKernel]]) -> Iterator[Record]:
    known = np.array(list(by_rows))
    sample = {int(known[np.abs(known - rows).argmin()]) for rows in np.geomspace(known[0], known[-1], SAMPLES)}
    for rows in sorted(sample):
        trial = by_rows[rows][0]
        for language in LANGUAGES:
            for subject, program in (("kernel", lower(problem, trial.candidate)), ("proxy", trial.program)):
                figures = compile_figures(program, language)
                yield {"measure": "seconds", "layer": layer, "m1": rows, "subject": subject, **figures}


def compile_figures(program: KernelProgram, language: str) -> Record:
    """Processor time of the compilers, which is the same on a busy machine; the linker's is hundredths of it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as directory:
        binary = compile_kernel(
            emit(program, language, DEVICE.arch),
            arch=DEVICE.arch,
            registers=program.registers,
            store=Store(Path(directory)),
            workers=1,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "compiler": LANGUAGES[language],
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 3),
        "code_bytes": binary.code_bytes,
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes,
    }


def total(records: list[Record], measure: str, layer: str, figure: str) -> int:
    return sum(record[figure] for record in records if record["measure"] == measure and record["layer"] == layer)


def print_table(records: list[Record], layers: list[str]) -> None:
    for layer in layers:
        every, once, proxy = (
            total(records, "code", layer, figure)
            for figure in ("kernels_instructions", "kernel_instructions", "proxy_instructions")
        )
        kernels = total(records, "code", layer, "kernels")
        of_layer = [record for record in records if record["measure"] == "code" and record["layer"] == layer]
        kept = [record["kept_loads"] for record in of_layer]
        print(f"{layer}: {kernels} kernels, {len(of_layer)} proxies, kept loads {min(kept)} to {max(kept)}")
        print(f"  instructions: {every:,} in all kernels, {once:,} in one of each M1, {proxy:,} in the proxies")
        print(f"  all kernels / proxies {every / proxy:.1f}, one of each M1 / proxies {once / proxy:.1f}")
    kernels_bytes, proxy_bytes = (total(records, "ptx", layers[0], name) for name in ("kernels_bytes", "proxy_bytes"))
    print(f"{layers[0]}: {kernels_bytes:,} bytes of PTX in all kernels, {proxy_bytes:,} in the proxies")
    columns = ["m1", "subject", "compiler", "cpu_seconds", "code_bytes", "registers", "spill_bytes"]
    print("  ".join(f"{column:>11}" for column in columns))
    for record in records:
        if record["measure"] == "seconds":
            print("  ".join(f"{record[column]:>11}" for column in columns))


def plot(records: list[Record], layers: list[str], path: Path) -> None:
    figure, panels = plt.subplots(1, len(layers) + 1, figsize=(15, 4.5), layout="constrained")
    lines = {
        "all kernels with this M1": ("kernels_instructions", "-"),
        "one of them": ("kernel_instructions", "--"),
        "the proxy": ("proxy_instructions", "-"),
    }
    for panel, layer in zip(panels, layers, strict=False):
        points = [record for record in records if record["measure"] == "code" and record["layer"] == layer]
        for label, (name, style) in lines.items():
            panel.loglog([point["m1"] for point in points], [point[name] for point in points], style, label=label)
        panel.set_title(layer)
        panel.set_ylabel("instructions")
    for subject, style in (("kernel", "o-"), ("proxy", "s--")):
        for compiler in LANGUAGES.values():
            points = [
                record
                for record in records
                if record["measure"] == "seconds" and (record["subject"], record["compiler"]) == (subject, compiler)
            ]
            seconds = [point["cpu_seconds"] for point in points]
            panels[-1].loglog([point["m1"] for point in points], seconds, style, label=f"one {subject}, {compiler}")
    panels[-1].set_title(layers[0])
    panels[-1].set_ylabel("processor seconds to compile")
    for panel in panels:
        panel.set_xlabel("M1")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.suptitle(f"Proxies and the kernels that they stand for, N = {COLUMNS}, {DEVICE.title}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Section 5: the code of proxies beside that of the kernels.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where results go")
    options = parser.parse_args()
    plt.switch_backend("agg")
    records: list[Record] = []
    layers = []
    for number, (m, k, sparsity) in enumerate(LAYERS):
        problem = Problem(uniform(m, k, sparsity, seed=0), COLUMNS, DEVICE)
        layer = f"{m} x {k} at {sparsity:.0%}"
        layers.append(layer)
        by_rows = trials_by_rows(problem)
        records += measure_code(problem, layer, by_rows)
        if number == 0:
            records += [*measure_ptx(problem, layer, by_rows), *measure_seconds(problem, layer, by_rows)]
    print_table(records, layers)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "proxies.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    plot(records, layers, options.out / "proxies.png")


if __name__ == "__main__":
    main()
