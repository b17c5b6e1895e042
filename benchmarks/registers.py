"""Section 3.2: is the register forecast right? Compiles kernels of the space and looks for spills.

    python -m benchmarks.registers [--out DIR] [--kernels 240] [--cuda 24] [--o3 60] [--layers DIR]

draws survivors of the constraints, with their schedules, from problems of several shapes, sparsities and GPUs (and
from the files of ``--layers``), compiles each as a whole kernel with the forecast as its register limit, and writes a
record of each to ``registers.jsonl``. ``--o3`` of those through PTX are compiled at ptxas -O3 too, for comparison.
Exits 1 if a kernel as the project compiles it spills or needs more registers than forecast.
"""

import argparse
import dataclasses
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

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
from lospmm.toolchain import compile, compilers
from lospmm.toolchain.compile import compile_kernel
from lospmm_datasets.synthetic import uniform

SHAPES = [(64, 147, 0.9), (128, 1152, 0.9), (256, 256, 0.5), (256, 1024, 0.95), (384, 384, 0.7), (512, 512, 0.98)]
COLUMNS = [49, 196, 1000, 4096, 12544, 50176]
GPUS = ["h200", "h200", "a100", "rtx2080ti", "l40s", "b200"]


IN_USE = "-O1"


@contextmanager
def ptxas_level(level: str) -> Iterator[None]:
    """Within the block, PTX is compiled at ``level``, as in "-O3"."""

    def at_level(*arguments: Any) -> compilers.Compiler:
        compiler = compilers.COMPILERS["ptx"](*arguments)
        assert IN_USE in compiler.options
        options = tuple(level if option == IN_USE else option for option in compiler.options)
        return dataclasses.replace(compiler, options=options)

    with mock.patch.object(compile, "COMPILERS", {**compilers.COMPILERS, "ptx": at_level}):
        yield


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


def compiled(name: str, problem: Problem, candidate: UnrolledPlan, language: str, level: str) -> dict[str, Any]:
    program = lower(problem, candidate)
    with tempfile.TemporaryDirectory() as directory, ptxas_level(level):
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
        "ptxas": level,
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
    parser.add_argument("--o3", type=int, default=60, help="of those through PTX, compiled at -O3 as well")
    parser.add_argument("--layers", type=Path, help="a folder of pruned layers to draw from as well")
    arguments = parser.parse_args()
    pool = list(matrices(arguments.layers))
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = [("ptx", IN_USE, arguments.kernels), ("cuda", IN_USE, arguments.cuda), ("ptx", "-O3", arguments.o3)]
    wrong = 0
    with (arguments.out / "registers.jsonl").open("w") as results:
        for language, level, count in rows:
            rng = random.Random(language)  # the kernels at -O3 are the first of those at the level in use
            records = []
            for number in range(count):
                record = compiled(*draw(pool, rng), language, level)
                records.append(record)
                print(json.dumps(record), file=results, flush=True)
                print(f"\r{language} {level} {number + 1}/{count}", end="", file=sys.stderr, flush=True)
            spilled = sum(record["spill_bytes"] + record["stack_bytes"] > 0 for record in records)
            above = sum(record["registers"] > record["forecast"] for record in records)
            wrong += spilled + above if level == IN_USE else 0
            print(f"\r{language} {level}: {count} kernels, {spilled} spill, {above} use more registers than forecast")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
