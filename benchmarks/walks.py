"""What walking code twice gains (``lospmm.walks``): the fastest kernel that does beside the fastest that does not.

    python -m benchmarks.walks [--out DIR]

needs an H200 or H100. Each problem is tuned as ``lospmm tune --measure gpu`` does; both kernels are those of its log.
Writes ``walks.jsonl`` and prints a line per problem.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.recorded import record
from lospmm import jobs
from lospmm.artifact import TUNING_FILE
from lospmm.model import Problem
from lospmm.options import Options
from lospmm.runtime.detect import detect_device
from lospmm.store import Store
from lospmm_datasets.synthetic import uniform

#: (m, k, n, sparsity), all of several waves of blocks.
PROBLEMS = (
    *((3072, 768, 4096, sparsity) for sparsity in (0.7, 0.8, 0.9, 0.95, 0.98)),
    (2304, 768, 4096, 0.9),
    (768, 3072, 4096, 0.9),
    (768, 768, 16384, 0.9),
    (768, 768, 65536, 0.9),
    (1024, 1024, 8192, 0.9),
    (4096, 1024, 2048, 0.95),
    (512, 512, 16384, 0.95),
)

#: What a line has of a kernel.
FIELDS = ("rows", "cols", "prefetch", "column_group", "lockstep", "split_k")


def micros(line: Mapping[str, Any]) -> float:
    """As a search goes by it: the median of its finals, if it had any."""
    return statistics.median(line["final_micros"] or [line["measured_micros"]])


def records() -> Iterator[dict[str, Any]]:
    device = detect_device()
    options = Options(measure="gpu", families="unrolled", shortlist_size=40)
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        for m, k, n, sparsity in PROBLEMS:
            request = jobs.Request(Problem(uniform(m, k, sparsity, seed=0), n, device), options, "stored")
            made = jobs.tune(request, store=store)
            lines = [json.loads(line) for line in made.files[TUNING_FILE].splitlines()]
            timed = [line for line in lines if line["measured_micros"] is not None]
            found: dict[str, Any] = {"device": device.name, "m": m, "k": k, "n": n, "sparsity": sparsity}
            for name, walks in (("once", 1), ("twice", 2)):
                own = [line for line in timed if line["walks"] == walks]
                best = min(own, key=micros, default=None)
                found[name] = best and {**{field: best[field] for field in FIELDS}, "micros": round(micros(best), 2)}
                found[f"{name}_timed"] = len(own)
            yield found


def shown(row: dict[str, Any]) -> str:
    once, twice = row["once"], row["twice"]
    ratio = None if twice is None else round(twice["micros"] / once["micros"], 3)
    return f"{row['m']} x {row['k']}, n {row['n']}, {row['sparsity']:.0%}: {once} {twice} {ratio}"


def main() -> None:
    record("walks", records(), shown, description=__doc__)


if __name__ == "__main__":
    main()
