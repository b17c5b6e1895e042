"""Comparison of the analytic estimate with times on a GPU.

    python -m fitting.estimate_on_gpu [--out DIR] [--sample 60] [--seed 0] [--emitter sass]

needs an NVIDIA GPU of the device table. For each problem it times the candidate that is predicted fastest, and
``--sample`` others: half of them drawn from the best third by estimate, half from the whole space. Each is checked
against float64 on poisoned memory, with B from memory, by ``lospmm.gpu.bench.Bench``. Adds to
``estimate_on_gpu.jsonl`` and prints, per problem, the choice, the best of the sample and the rank correlation.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.harness import open_lines
from fitting import DATA
from lospmm.errors import LospmmError
from lospmm.families.candidate import unrolled
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device
from lospmm.gpu.messages import Measurement
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import UnrolledPlan
from lospmm.space.estimate import estimate_micros
from lospmm.space.explore import widen
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.tuning.build import for_emitter
from lospmm.tuning.options import splits_of
from lospmm.tuning.runner import GpuRunner
from lospmm.tuning.unrolled import search
from lospmm_datasets.synthetic import uniform

NAME = "estimate_on_gpu.jsonl.gz"

PROBLEMS = [
    (768, 768, 4096, 0.7),
    (768, 768, 4096, 0.9),
    (768, 768, 4096, 0.98),
    (3072, 768, 4096, 0.9),
    (256, 576, 12544, 0.9),
    (64, 576, 50176, 0.9),
    (768, 768, 16384, 0.9),
    (512, 4608, 1568, 0.9),
    (512, 2048, 784, 0.95),
    (256, 2304, 3136, 0.9),
]


def candidates_of(problem: Problem, sample: int, seed: int, emitter: str) -> list[tuple[str, UnrolledPlan]]:
    """Return the choice of the estimate and a sample of other candidates, each with its role."""
    choice = search(problem, estimate_micros, 1, Stages(), splits=splits_of(emitter))
    rng = random.Random(seed)
    pool = widen(problem, choice.space)
    best = pool.take(np.argsort(estimate_micros(problem, pool))[: max(len(pool) // 3, 1)])
    drawn = [rng.choice(best if number % 2 else pool) for number in range(sample)]
    return [("choice", choice.winner.plan), *(("sample", candidate) for candidate in drawn)]


def record(problem: Problem, emitter: str, what: str, candidate: UnrolledPlan, found: Measurement) -> dict[str, Any]:
    """Return a result as a line of the file."""
    timing, schedule = found.timing, candidate.schedule
    return {
        "m": problem.matrix.m,
        "k": problem.matrix.k,
        "n": problem.n,
        "nnz": problem.matrix.nnz,
        "device": problem.device.name,
        "what": what,
        "emitter": emitter,
        "rows": candidate.tile.rows,
        "cols": candidate.tile.cols,
        "prefetch": schedule.prefetch,
        "column_group": schedule.column_group,
        "split_k": schedule.split_k,
        "estimated_micros": round(float(estimate_micros(problem, [candidate])[0]), 2),
        "micros": None if timing is None else round(timing.micros, 2),
        "spread": None if timing is None else round(timing.spread, 4),
        "max_relative_error": found.max_relative_error,
        "failure": found.failure,
    }


def timed(key: tuple[int, int, int, float], sample: int, seed: int, emitter: str) -> Iterator[dict[str, Any]]:
    """Time the candidates of a problem and yield their lines."""
    m, k, n, sparsity = key
    problem = for_emitter(Problem(uniform(m, k, sparsity, seed=0), n, detect_device()), emitter)
    named = candidates_of(problem, sample, seed, emitter)
    with tempfile.TemporaryDirectory() as directory, Bench(problem) as bench:
        store, workers = Store(Path(directory)), settings().workers
        with GpuRunner(problem, emitter, bench, store=store, workers=workers, stages=Stages()) as runner:
            found = runner.again([unrolled(candidate) for _, candidate in named])
            for (what, candidate), measurement in zip(named, found, strict=True):
                yield record(problem, emitter, what, candidate, measurement)


def summary(records: list[dict[str, Any]]) -> str:
    """Return the results of a problem in one line of text."""
    first, failures = records[0], sum(r["micros"] is None for r in records)
    records = [r for r in records if r["micros"] is not None]
    choice = next((r["micros"] for r in records if r["what"] == "choice"), float("nan"))
    rank = spearmanr([r["estimated_micros"] for r in records], [r["micros"] for r in records]).statistic
    return (
        f"{first['m']:5} {first['k']:5} {first['n']:6} {first['nnz']:8,}  choice {choice:7.1f}"
        f"  estimated {first['estimated_micros']:7.1f}  best of {len(records)} {min(r['micros'] for r in records):7.1f}"
        f"  rank correlation {rank:5.2f}  worst error {max(r['max_relative_error'] for r in records):.1e}"
        f"  failed {failures}"
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="draws the sample")
    parser.add_argument("--emitter", default="sass")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with open_lines(arguments.out / NAME, "a") as results:
        for key in PROBLEMS:
            found = []
            try:
                for line in timed(key, arguments.sample, arguments.seed, arguments.emitter):
                    found.append(line)
                    print(json.dumps(line), file=results, flush=True)
            except LospmmError as error:
                failed += 1
                print(f"{key}: {error}", file=sys.stderr)
            if found:
                print(summary(found), flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
