"""What dense blocks as parts of hyb are worth on this machine's GPU (docs/families.md).

    python -m benchmarks.block_parts [--plans COUNT] [--out DIR] [--commit HASH]

Matrices of dense blocks, whole or nearly, with single entries beside them or without. Of each kind of hyb (buckets,
strips with blocks, partitions) and of the families beside it the ``--plans`` plans that the forecast puts first are
built on all cores, checked, every element of C, and timed briefly, beside cuSPARSE and cuBLAS of the same type. A
problem is a line of ``block_parts.jsonl``.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.families import baselines_for, timed_baseline, timed_family
from benchmarks.families_build import Built, build_plan
from benchmarks.harness import write_results
from benchmarks.kernels import ROOT, commit_of, versions
from lospmm.families import FAMILIES
from lospmm.families.buckets import Buckets
from lospmm.families.partitions import Partitions
from lospmm.families.strips import Strips
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device, own_gpu_id
from lospmm.gpu.exclusive import exclusive
from lospmm.matrix.csr import SparseMatrix, from_coo
from lospmm.problem.device import DeviceSpec
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm_datasets.graphs import blocks

KINDS: Mapping[str, tuple[str, type | None]] = {
    "hyb, buckets": ("hyb", Buckets),
    "hyb, strips": ("hyb", Strips),
    "hyb, partitions": ("hyb", Partitions),
    "csr": ("csr", None),
    "group_coo": ("group_coo", None),
    "block_group_coo": ("block_group_coo", None),
    "tensor_core": ("tensor_core", None),
}


@dataclass(frozen=True, slots=True)
class Case:
    side: int  # of A
    block: int
    empty: float  # the share of blocks that are
    kept: float  # of a block's elements
    beside: float  # single entries, of all elements
    n: int
    dtype: str

    @property
    def name(self) -> str:
        beside = f", {self.beside:.1%} beside" if self.beside else ""
        return (
            f"{self.side} x {self.side}, blocks of {self.block}, {self.empty:.0%} empty, {self.kept:.0%} kept{beside}, "
            f"n {self.n}, {self.dtype}"
        )


CASES = tuple(
    Case(side, block, empty, kept, beside, n, dtype)
    for dtype in ("float32", "float16")
    for side, block, empty, kept, beside, n in (
        (4096, 8, 0.95, 1.0, 0.0, 128),
        (4096, 8, 0.95, 1.0, 0.0, 1024),
        (4096, 8, 0.98, 0.8, 0.0, 1024),
        (4096, 8, 0.98, 0.8, 0.002, 1024),
        (4096, 16, 0.98, 0.6, 0.0, 1024),
        (1024, 8, 0.9, 1.0, 0.0, 4096),
    )
)


def matrix_of(case: Case) -> SparseMatrix:
    whole = blocks(case.side, case.side, case.block, case.empty, seed=7)
    rng = np.random.default_rng(8)
    kept = rng.random(whole.nnz) < case.kept
    places = whole.rows_of_nonzeros()[kept].astype(np.int64) * case.side + whole.indices[kept]
    others = np.unique(rng.integers(0, case.side**2, round(case.beside * case.side**2)))
    others = np.setdiff1d(others, places)
    rows, columns = np.divmod(np.concatenate((places, others)), case.side)
    return from_coo(
        (case.side, case.side), rows, columns, np.concatenate((whole.data[kept], np.ones(len(others), np.float32)))
    )


def prepared(case: Case, device: DeviceSpec, count: int, folder: Path) -> tuple[Case, Problem, dict[str, list[Built]]]:
    """The kernels of a problem by kind, in files of ``folder``; in a builder."""
    problem = Problem(matrix_of(case), case.n, device, dtype=DTYPES[case.dtype])
    found: dict[str, list[Built]] = {}
    for kind, (name, of_type) in KINDS.items():
        family = FAMILIES[name]
        if family.refusal(problem):
            continue
        plans = [plan for plan in family.plans(problem) if of_type is None or isinstance(plan, of_type)]
        if plans:
            micros = family.forecast(problem, plans)
            first = np.argsort(micros, kind="stable")[:count]
            found[kind] = [build_plan(problem, name, plans[at], float(micros[at]), folder) for at in first]
    return case, problem, found


def line_of(case: Case, context: Mapping[str, Any], kinds: Mapping[str, list[Built]], bench: Bench) -> dict[str, Any]:
    """Everything about a problem; its kernels' files are removed."""
    problem = bench.problem
    timed = {kind: timed_family(bench, built) for kind, built in kinds.items()}
    libraries = {name: timed_baseline(bench, name) for name in baselines_for(problem)}
    for kernel in (one.kernel for built in kinds.values() for one in built):
        if kernel is not None:
            kernel.cubin.unlink(missing_ok=True)
    matrix = problem.matrix
    shape = {"m": matrix.m, "k": matrix.k, "nnz": matrix.nnz, "n": problem.n, "dtype": case.dtype}
    return {"problem": case.name, **context, **shape, "kinds": timed, "libraries": libraries}


def lines(count: int, commit: str) -> Iterator[dict[str, Any]]:
    device = detect_device()
    context = {"machine": {"device": device.name, "title": device.title}, "versions": versions(), "commit": commit}
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as builders,
    ):
        futures = [builders.submit(prepared, case, device, count, Path(folder)) for case in CASES]
        for future in futures:
            case, problem, kinds = future.result()
            with exclusive(settings().cache_dir, gpu=own_gpu_id()), Bench(problem) as bench:
                yield line_of(case, context, kinds, bench)


def row(line: Mapping[str, Any]) -> str:
    """Microseconds of each kind, of the libraries, and what failed."""
    failed = sum(len(found["failures"]) for found in line["kinds"].values())
    cells = "".join(f"{'-' if micros is None else f'{micros:.1f}':>9}" for micros in times_of(line))
    return f"{line['problem']:78}{cells}{f'  {failed} FAILED' if failed else ''}"


def head() -> str:
    titles = ("buckets", "strips", "partit.", "csr", "g_coo", "bg_coo", "tensor", "cuSPARSE", "cuBLAS")
    return f"{'us':78}" + "".join(f"{title:>9}" for title in titles)


def times_of(line: Mapping[str, Any]) -> list[float | None]:
    """Microseconds of KINDS, of cuSPARSE and of cuBLAS."""
    times = {name: found.get("micros") for name, found in (line["kinds"] | line["libraries"]).items()}
    dense = next((micros for name, micros in times.items() if name.startswith("cublas")), None)
    return [*(times.get(kind) for kind in KINDS), times.get("cusparse"), dense]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    arguments = parser.parse_args()
    print(head())
    found = {}
    for line in lines(arguments.plans, arguments.commit or commit_of(ROOT)):
        found[line["problem"]] = line
        print(row(line), flush=True)
        write_results(arguments.out / "block_parts.jsonl", found)


if __name__ == "__main__":
    main()
