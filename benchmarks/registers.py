"""Section 3.2: is the register forecast right? Compiles kernels of the space and looks for spills.

    python -m benchmarks.registers [--out DIR] [--kernels 240] [--cuda 24] [--layers DIR]

draws survivors of the constraints, with their schedules, from problems of several shapes, sparsities and GPUs (and
from the files of ``--layers``), compiles each as a whole kernel with the forecast as its register limit, and writes a
record of each to ``registers.jsonl``. Exits 1 if one spills or needs more registers than forecast.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lospmm.codegen import emit
from lospmm.codegen.lower import lower
from lospmm.matrix import readers
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import UnrolledPlan
from lospmm.space.explore import explore, widen
from lospmm.space.reorder import regroup
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm_datasets.synthetic import uniform

SHAPES = [(64, 147, 0.9), (128, 1152, 0.9), (256, 256, 0.5), (256, 1024, 0.95), (384, 384, 0.7), (512, 512, 0.98)]
COLUMNS = [49, 196, 1000, 4096, 12544, 50176]
GPUS = ["h200", "h200", "a100", "rtx2080ti", "l40s", "b200"]


def matrices(layers: Path | None) -> Iterator[tuple[str, SparseMatrix]]:
    for seed, (m, k, sparsity) in enumerate(SHAPES):
        yield f"uniform {m} x {k}, {sparsity:.0%}", uniform(m, k, sparsity, seed)
    if layers is not None:
        for path in sorted(p for p in layers.rglob("*") if p.suffix in (".smtx", ".npz")):
            matrix = readers.read(path).matrix
            if 0 < matrix.nnz <= 30_000:
                yield str(path.relative_to(layers)), matrix


def draw(pool: list[tuple[str, SparseMatrix]], rng: random.Random) -> tuple[str, Problem, UnrolledPlan]:
    """One survivor of one problem; deep and shallow schedules, large and small tiles alike."""
    name, matrix = rng.choice(pool)
    problem = Problem(matrix, rng.choice(COLUMNS), DEVICES[rng.choice(GPUS)])
    space = explore(problem, lambda limits: regroup(matrix, limits))
    by_rows: dict[int, list[UnrolledPlan]] = {}
    for survivor in space.survivors:
        by_rows.setdefault(survivor.tile.rows, []).append(survivor)
    survivor = rng.choice(by_rows[rng.choice(sorted(by_rows))])
    return name, problem, rng.choice(widen(problem, replace(space, survivors=(survivor,))))


def compiled(name: str, problem: Problem, candidate: UnrolledPlan, language: str) -> dict[str, Any]:
    program = lower(problem, candidate)
    with tempfile.TemporaryDirectory() as directory:
        binary = compile_kernel(
            emit(program, language, problem.device.arch),
            arch=problem.device.arch,
            registers=program.registers,
            store=Store(Path(directory)),
            workers=settings().workers,
        )
    schedule = candidate.schedule
    return {
        "matrix": name,
        "nnz": problem.matrix.nnz,
        "n": problem.n,
        "device": problem.device.name,
        "emitter": language,
        "rows": candidate.tile.rows,
        "cols": candidate.tile.cols,
        "prefetch": schedule.prefetch,
        "column_group": schedule.column_group,
        "forecast": program.registers,
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes,
        "stack_bytes": binary.stack_bytes,
        "toolchain": binary.toolchain.split(" (")[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--kernels", type=int, default=240, help="kernels through PTX")
    parser.add_argument("--cuda", type=int, default=24, help="kernels through CUDA C++")
    parser.add_argument("--layers", type=Path, help="a folder of pruned layers to draw from as well")
    arguments = parser.parse_args()
    pool = list(matrices(arguments.layers))
    arguments.out.mkdir(parents=True, exist_ok=True)
    wrong = 0
    with (arguments.out / "registers.jsonl").open("w") as results:
        for language, count in (("ptx", arguments.kernels), ("cuda", arguments.cuda)):
            rng = random.Random(language)
            records = []
            for _ in range(count):
                records.append(compiled(*draw(pool, rng), language))
                print(json.dumps(records[-1]), file=results, flush=True)
            spilled = sum(record["spill_bytes"] + record["stack_bytes"] > 0 for record in records)
            above = sum(record["registers"] > record["forecast"] for record in records)
            wrong += spilled + above
            print(f"{language}: {count} kernels, {spilled} spill, {above} use more registers than forecast")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
