"""How long the estimate, and the rank model behind it, take to put a whole space in order, on one core.

    python -m benchmarks.scoring [--out DIR]

scores every candidate of machine code for an H200 of two problems, splits included. The figure is the best of
``REPEATS``, what the machine can do when nothing else runs on it; the median is beside it. Writes ``scoring.jsonl``.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from benchmarks.emission import processor
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.estimate import estimate_micros
from lospmm.space.explore import widen
from lospmm.stages import Stages
from lospmm.tuning.build import for_emitter
from lospmm.tuning.options import splits_of
from lospmm.tuning.unrolled import explore_problem
from lospmm_datasets.synthetic import uniform
from lospmm_rank.predict.lambdamart import ranker_for

#: m, k, share of zeros, n.
CASES = ((768, 768, 0.9, 4096), (512, 4608, 0.9, 1568))
DEVICE = "h200"
REPEATS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    out = parser.parse_args().out
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    lines = []
    for m, k, sparsity, n in CASES:
        problem = for_emitter(Problem(uniform(m, k, sparsity, seed=0), n, DEVICES[DEVICE]), "sass")
        space = explore_problem(problem, Stages(), splits=splits_of("sass", problem.device.arch))
        candidates = widen(problem, space, 128)
        name = f"{m} x {k}, n {n}, {sparsity:.0%}"
        for order, ranker in (("estimate", estimate_micros), ("lambdamart", ranker_for(DEVICES[DEVICE]))):
            seconds = []
            for _ in range(REPEATS):
                started = time.perf_counter()
                ranker(problem, candidates)
                seconds.append(time.perf_counter() - started)
            best, median = 1e3 * min(seconds), 1e3 * statistics.median(seconds)
            print(f"{name:28} {len(candidates):8,} candidates by {order:10}: {best:6.1f} ms, median {median:6.1f} ms")
            case = {"problem": name, "device": DEVICE, "candidates": len(candidates), "processor": processor()}
            lines.append({**case, "order": order, "best_ms": round(best, 2), "median_ms": round(median, 2)})
    out.mkdir(parents=True, exist_ok=True)
    (out / "scoring.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
