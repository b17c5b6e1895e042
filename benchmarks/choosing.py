"""How long it takes to choose a family and its plan without a measurement (``--budget 0``), on one core.

    python -m benchmarks.choosing [--out DIR]

names and forecasts the plans of all families but the unrolled one, whose search is apart, for layers in float16, and
cuBLAS beside them: what happens between a matrix that was read and what is built. The figure is the best of
``REPEATS``, what one core can do, in seconds of its own time, each on a matrix of its own, of which nothing is
known yet; the median is beside it. Writes ``choosing.jsonl``.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks.emission import processor
from lospmm.families import FAMILIES
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Problem
from lospmm.tuning.plans import plans_for
from lospmm_datasets.synthetic import uniform

#: m and k; share of zeros; n.
SIDES = (768, 4096)
SPARSITIES = (0.5, 0.7, 0.9)
COLUMNS = (16, 512, 4096)

DEVICE, DTYPE = "h200", "float16"
REPEATS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    out = parser.parse_args().out
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    first = Problem(uniform(64, 64, 0.9, seed=0), 64, DEVICES[DEVICE], dtype=DTYPES[DTYPE])
    names = tuple(FAMILIES)
    plans_for(first, names)  # which reads the corrections
    lines = []
    for side, sparsity in product(SIDES, SPARSITIES):
        matrix = uniform(side, side, sparsity, seed=0)
        for n in COLUMNS:
            seconds = []
            for _ in range(REPEATS):
                own = SparseMatrix(matrix.m, matrix.k, matrix.indptr, matrix.indices, matrix.data * (1 + len(seconds)))
                assert own.fingerprint  # a request has asked for it before
                started = time.process_time()
                known = plans_for(replace(first, matrix=own, n=n), names)
                seconds.append(time.process_time() - started)
            best, median = 1e3 * min(seconds), 1e3 * statistics.median(seconds)
            name, plans = f"{side} x {side}, n {n}, {sparsity:.0%}", len(known.plans)
            print(f"{name:28} {plans:6,} plans: {best:6.1f} ms, median {median:6.1f} ms")
            case = {"problem": name, "side": side, "sparsity": sparsity, "n": n, "dtype": DTYPE, "device": DEVICE}
            figures = {"plans": plans, "best_ms": round(best, 2), "median_ms": round(median, 2)}
            lines.append({**case, **figures, "processor": processor()})
    out.mkdir(parents=True, exist_ok=True)
    (out / "choosing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
