"""Section 5: how much less code the proxies of a search space are than its kernels (``proxies_on_gpu``: how they do).

    python -m benchmarks.proxies [--out DIR]

writes ``proxies.jsonl`` and prints sums. A line is one M1 of one layer: the instructions of all kernels with this M1,
of one of them, and of the proxy.
"""

import argparse
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.explore import explore
from lospmm.space.reorder import regroup
from lospmm_datasets.synthetic import uniform
from lospmm_proxies import proxies
from lospmm_proxies.loops import kept_share
from lospmm_proxies.trial import ProxyKernel

Record = dict[str, Any]

DEVICE = DEVICES["h200"]
COLUMNS = 4096
#: (m, k, sparsity). The others are there for what the first does not reach: many tiles, and long loops.
LAYERS = [(768, 768, 0.9), (3072, 768, 0.7), (768, 3072, 0.7)]


def trials_by_rows(problem: Problem) -> dict[int, list[ProxyKernel]]:
    """The proxies of every tile size that the constraints leave, by M1; those of one M1 share one program."""
    workers = len(os.sched_getaffinity(0))
    space = explore(problem, lambda limits: regroup(problem.matrix, limits, workers=workers))
    trials = sorted(proxies(problem, space.survivors), key=lambda trial: trial.candidate.tile)
    return {rows: list(group) for rows, group in itertools.groupby(trials, key=lambda trial: trial.candidate.tile.rows)}


def measured(problem: Problem, layer: str, by_rows: dict[int, list[ProxyKernel]]) -> Iterator[Record]:
    for rows, trials in by_rows.items():
        tiling, proxy = trials[0].candidate.tiling, trials[0].program
        kernel = int(tiling.nnc.sum()) + problem.matrix.nnz + problem.matrix.m
        yield {
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


def total(records: list[Record], layer: str, figure: str) -> int:
    return sum(record[figure] for record in records if record["layer"] == layer)


def print_table(records: list[Record], layers: list[str]) -> None:
    for layer in layers:
        every, once, proxy = (
            total(records, layer, figure)
            for figure in ("kernels_instructions", "kernel_instructions", "proxy_instructions")
        )
        kernels = total(records, layer, "kernels")
        of_layer = [record for record in records if record["layer"] == layer]
        kept = [record["kept_loads"] for record in of_layer]
        print(f"{layer}: {kernels} kernels, {len(of_layer)} proxies, kept loads {min(kept)} to {max(kept)}")
        print(f"  instructions: {every:,} in all kernels, {once:,} in one of each M1, {proxy:,} in the proxies")
        print(f"  all kernels / proxies {every / proxy:.1f}, one of each M1 / proxies {once / proxy:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Section 5: the code of proxies beside that of the kernels.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where results go")
    options = parser.parse_args()
    records: list[Record] = []
    layers = []
    for m, k, sparsity in LAYERS:
        problem = Problem(uniform(m, k, sparsity, seed=0), COLUMNS, DEVICE)
        layer = f"{m} x {k} at {sparsity:.0%}"
        layers.append(layer)
        by_rows = trials_by_rows(problem)
        records += measured(problem, layer, by_rows)
    print_table(records, layers)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "proxies.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()
