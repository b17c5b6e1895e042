"""GroupCOO, BlockGroupCOO and generated Einsum kernels on their own kinds of work, beside cuSPARSE, cuBLAS and PyTorch.

    python -m benchmarks.einsum [--out DIR] [--case NAME]... [--plans 8] [--commit HASH]

needs an NVIDIA GPU of the device table, and PyTorch for the libraries. Each case is a process of its own with a time
limit; kernels are compiled before, by all cores. A family's kernels are the ``--plans`` that its forecast puts first
and half as many drawn from the others; each is checked against float64 before it is timed, with its operands from
memory. Adds to ``einsum.jsonl`` of DIR and prints a table.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.einsum_cases import SPMM, Spmm
from benchmarks.einsum_clock import Clock, commit
from benchmarks.einsum_generated import GENERATED
from benchmarks.einsum_generated import build as build_generated
from benchmarks.einsum_generated import run as run_generated
from lospmm.families import FAMILIES
from lospmm.families.packed import PackedKernel
from lospmm.gpu.detect import own_gpu
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.device import find_device
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import PLAIN
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.template import emission_of

RESULTS = "einsum.jsonl"

#: Of a case, with its libraries and its kernels.
CASE_SECONDS = 60


def problem_of(case: Spmm, matrix: SparseMatrix, dtype: str) -> Problem:
    return Problem(matrix, case.n, find_device(own_gpu() or "h200"), None, PLAIN, DTYPES[dtype])


def kernels_of(problem: Problem, family: str, count: int) -> Iterator[tuple[dict[str, Any], float, PackedKernel]]:
    """Plans as JSON, their forecasts and their kernels: the ``count`` forecast first, and half as many others."""
    row = FAMILIES[family]
    if row.refusal(problem) is not None:
        return
    plans = list(row.plans(problem))
    forecasts = row.forecast(problem, plans)
    order = np.argsort(forecasts, kind="stable")
    others = np.random.default_rng(0).permutation(order[count:])[: count // 2]
    for at in (*order[:count], *others):
        yield asdict(plans[at]), float(forecasts[at]), row.pack(problem, plans[at])


def build(kernel: PackedKernel, arch: str) -> bytes:
    store = Store(settings().cache_dir)
    return compile_kernel(emission_of(kernel), arch=arch, registers=kernel.registers, store=store, workers=1).cubin


def build_case(name: str, count: int) -> int:
    """Every text of a case, once, into the cache."""
    texts: dict[str, PackedKernel] = {}
    matrix = SPMM[name].make()
    for dtype in SPMM[name].dtypes:
        problem = problem_of(SPMM[name], matrix, dtype)
        for family in SPMM[name].families:
            texts |= {kernel.source: kernel for _, _, kernel in kernels_of(problem, family, count)}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda kernel: build(kernel, problem.device.arch), texts.values()))
    return len(texts)


def run_case(name: str, count: int) -> Iterator[dict[str, Any]]:
    """A line for each type."""
    case = SPMM[name]
    matrix = case.make()
    for dtype in case.dtypes:
        problem = problem_of(case, matrix, dtype)
        with Clock(problem) as clock:
            line: dict[str, Any] = {
                "case": name,
                "dtype": dtype,
                "device": problem.device.name,
                "commit": commit(),
                "m": matrix.m,
                "k": matrix.k,
                "n": problem.n,
                "nnz": matrix.nnz,
                "libraries": clock.libraries(),
                "kernels": [],
            }
            for family in case.families:
                for plan, forecast, kernel in kernels_of(problem, family, count):
                    measured = clock.kernel(build(kernel, problem.device.arch), kernel)
                    line["kernels"].append({"family": family, "plan": plan, "forecast_micros": forecast, **measured})
        yield line


def row_of(line: dict[str, Any]) -> str:
    best: dict[str, dict[str, Any]] = {}
    for kernel in line["kernels"]:
        if kernel["micros"] is not None:
            held = best.setdefault(kernel["family"], kernel)
            best[kernel["family"]] = min(held, kernel, key=lambda one: one["micros"])
    failures = sum(kernel["micros"] is None for kernel in line["kernels"])
    libraries = {name: found["micros"] for name, found in line["libraries"].items() if found["micros"] is not None}
    cells = [f"{name} {micros:.1f}" for name, micros in libraries.items()]
    for family, kernel in best.items():
        first = next(one for one in line["kernels"] if one["family"] == family)
        cells.append(f"{family} {kernel['micros']:.1f} (forecast's {first['micros']}) {list(kernel['plan'].values())}")
    return f"{line['case']}, {line['dtype']}, n {line['n']}: {'; '.join(cells)}" + f" [{failures} failed]" * bool(
        failures
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--case", action="append", choices=[*SPMM, *GENERATED])
    parser.add_argument("--plans", type=int, default=8)
    parser.add_argument("--commit")
    parser.add_argument("--part", choices=["build", "run"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.case or [*SPMM, *GENERATED]
    if arguments.part == "build":
        build_generated(names[0]) if names[0] in GENERATED else build_case(names[0], arguments.plans)
    elif arguments.part == "run":
        lines = run_generated(names[0]) if names[0] in GENERATED else run_case(names[0], arguments.plans)
        for line in lines:
            print(json.dumps(line), flush=True)
    else:
        if arguments.commit:
            os.environ["LOSPMM_COMMIT"] = arguments.commit
        measure(names, arguments.plans, arguments.out / RESULTS)


def part_of(name: str, part: str, count: int) -> tuple[str, str]:
    """What a process of its own printed, and why it ended; whole lines of one that was ended are good."""
    command = (sys.executable, "-m", "benchmarks.einsum", "--case", name, "--plans", str(count), "--part", part)
    try:
        found = subprocess.run(command, timeout=CASE_SECONDS, capture_output=True, text=True)
    except subprocess.TimeoutExpired as ended:
        return (ended.stdout or b"").decode(), f"not within {CASE_SECONDS} s"
    return found.stdout, found.stderr.strip()[-800:] if found.returncode else ""


def measure(names: list[str], count: int, path: Path) -> None:
    started = time.monotonic()
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        for name, (_, why) in zip(names, pool.map(lambda name: part_of(name, "build", count), names), strict=True):
            if why:
                print(f"{name}: cannot be built: {why}")
    print(f"built in {time.monotonic() - started:.0f} s", flush=True)
    for name in names:
        lines, why = part_of(name, "run", count)
        for text in lines.splitlines():
            with path.open("a") as file:
                file.write(text + "\n")
            print(row_of(json.loads(text)), flush=True)
        if why:
            print(f"{name}: {why}", flush=True)


if __name__ == "__main__":
    main()
