"""Every pruned layer of a folder from file to verified cubin, as a user would: no GPU, the text run on the CPU.

    python -m benchmarks.real_weights LAYERS [--out DIR] [--only TEXT] [--device h200]

tunes each ``.smtx`` and ``.npz`` below LAYERS for the device (N: the output pixels that a ``rn50_batchsizes.txt`` in
LAYERS gives for a ResNet-50 layer, 4096 for others), in a store of its own so that nothing is found ready, and writes
``real_weights.jsonl`` and a table. Exits 1 if a layer fails.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import values
from lospmm.errors import LospmmError
from lospmm.matrix import readers
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.reorder import natural_order
from lospmm.store import Store
from lospmm.tuning import jobs
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request

OTHER_COLUMNS = 4096


def columns_of(path: Path, pixels: dict[str, int]) -> int:
    """N: a ResNet-50 pattern is named as its layer in the list of batch sizes; SparseRT names the block group alone."""
    if "rn50" in path.parts:
        return pixels.get(path.stem, OTHER_COLUMNS)
    if named := re.fullmatch(r"resnet50_3x3_\d+_bg(\d)", path.stem):
        return pixels.get(f"bottleneck_2_block_group{named[1]}_1_1", OTHER_COLUMNS)
    return OTHER_COLUMNS


def read_pixels(layers: Path) -> dict[str, int]:
    lists = list(layers.rglob("rn50_batchsizes.txt"))
    if not lists:
        return {}
    lines = (line.split(",") for line in lists[0].read_text().split())
    return {name: int(count) for name, count in lines}


def tuned(path: Path, layers: Path, n: int, device: str) -> dict[str, Any]:
    file = readers.read(path)
    problem = Problem(file.matrix, n, DEVICES[device])
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        manifest = jobs.tune(
            Request(problem, Options(measure="none"), file.values), store=Store(Path(directory))
        ).manifest
    tile = manifest["tile"]
    return {
        "layer": str(path.relative_to(layers)),
        "m": file.matrix.m,
        "k": file.matrix.k,
        "n": n,
        "nnz": file.matrix.nnz,
        "empty_rows": int((file.matrix.row_nnz == 0).sum()),
        "rows": tile["rows"],
        "cols": tile["cols"],
        "prefetch": tile["prefetch"],
        "tiles": tile["count"] + tile["zero_blocks"],
        "nnc_natural": int(natural_order(file.matrix, tile["rows"]).nnc.sum()),
        "nnc_reordered": tile["nnc_sum"],
        "registers": manifest["registers"],
        "spill_bytes": manifest["spill_bytes"],
        "cubin_bytes": manifest["code_bytes"],
        "relaxed": manifest["search"]["relaxed"],
        "max_relative_error": manifest["verified"]["max_relative_error"],
        "wall_seconds": time.monotonic() - started,
        "seconds": {name: round(value, 3) for name, value in manifest["seconds"].items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", default="", help="tune only files whose path holds this text")
    parser.add_argument("--device", default="h200", choices=sorted(DEVICES))
    arguments = parser.parse_args()
    paths = sorted(p for p in arguments.layers.rglob("*") if p.suffix in (".smtx", ".npz") and arguments.only in str(p))
    if not paths:
        sys.exit(f"{arguments.layers}: no .smtx or .npz file that matches")
    pixels = read_pixels(arguments.layers)
    arguments.out.mkdir(parents=True, exist_ok=True)
    records, failed = [], 0
    with (arguments.out / "real_weights.jsonl").open("w") as results:
        for path in paths:
            try:
                record = tuned(path, arguments.layers, columns_of(path, pixels), arguments.device)
            except LospmmError as error:
                failed += 1
                print(f"{path}: FAILED: {error}")
                continue
            records.append(record)
            print(json.dumps(record), file=results, flush=True)
            print(values(record), flush=True)
    worst = max((record["max_relative_error"] for record in records), default=0.0)
    spilled = sum(record["spill_bytes"] > 0 for record in records)
    print(
        f"{len(records)} of {len(paths)} layers tuned, worst relative error {worst:.1e}, {spilled} spill, "
        f"{sum(record['wall_seconds'] for record in records):.0f} s"
    )
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
