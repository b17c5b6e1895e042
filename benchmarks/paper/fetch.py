"""Figure 9: what it costs to fetch a thread block's code, against how long that code is.

The paper counts misses of the instruction fetch. Where the GPU's counters can be read (``ncu``), lookups of an SM's
instruction cache and those that missed are counted; the time for an instruction is told in any case. With N of 256,000
every SM walks the same code over and over.
"""

import csv
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.paper.rows import Record, Row
from benchmarks.paper.timing import EMITTER, Stand
from lospmm.families.candidate import unrolled
from lospmm.gpu.detect import detect_device
from lospmm.gpu.driver import open_driver
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order
from lospmm.store import Store
from lospmm.tuning.build import build, for_emitter
from lospmm_datasets.synthetic import uniform

#: Section 5.1.3.
N, SPARSITY, COLS = 256_000, 0.5, 256
STABLE = 300
ROWS = (8, 32, 64)
ITERATIONS = (32, 64, 128, 256, 400, 600, 900, 1200)
PREFETCH = 16
KERNELS = tuple(itertools.product(ROWS, ITERATIONS))

FMA_LANES = 128  # multiply-adds that an SM starts a cycle (CUDA C++ Programming Guide, arithmetic throughput)

#: Warps that wait for an instruction, for each instruction issued.
NO_INSTRUCTION = "smsp__average_warps_issue_stalled_no_instruction_per_issue_active.ratio"
#: Lookups of the instruction cache of an SM, and those that missed.
MISSES = "sm__icc_requests_lookup_miss.sum"
LOOKUPS = "sm__icc_requests.sum"


def measure(stand: Stand) -> Iterator[Record]:
    device = stand.device
    peak = FMA_LANES * device.sms * device.clock_hz * 1e-6  # multiply-adds in a microsecond
    for rows, iterations in KERNELS:
        matrix = uniform(rows, iterations, SPARSITY, seed=0)
        candidate = _candidate(matrix)
        (micros,) = stand.times(matrix, N, [candidate])
        yield {
            "figure": "9",
            "rows": rows,
            "iterations": iterations,
            "instructions": matrix.nnz + int(candidate.tiling.nnc.sum()) + rows,
            "micros": round(micros, 3),
            "of_peak": round(matrix.nnz * N / peak / micros, 4),
            "memory_of_peak": round(4 * N * (iterations + rows) / device.memory_bandwidth * 1e6 / micros, 4),
        }


def _candidate(matrix: SparseMatrix) -> UnrolledPlan:
    """All rows in one tile."""
    return UnrolledPlan(TileSize(matrix.m, COLS), Schedule(PREFETCH), natural_order(matrix, matrix.m))


def launch_each() -> None:
    """Launch every kernel of ``measure`` once, for whoever counts what it does."""
    device, driver = detect_device(), open_driver()
    b = driver.allocate(4 * max(ITERATIONS) * N)
    c = driver.allocate(4 * max(ROWS) * N)
    with tempfile.TemporaryDirectory() as directory:
        for rows, iterations in KERNELS:
            matrix = uniform(rows, iterations, SPARSITY, seed=0)
            problem = for_emitter(Problem(matrix, N, device), EMITTER)
            built = build(problem, unrolled(_candidate(matrix)), EMITTER, store=Store(Path(directory)), workers=1)
            function = driver.load(built.binary.cubin, built.compiled.entry)
            driver.launch(function, built.compiled.launch, (np.uint64(b), np.uint64(c)))
            driver.synchronize()
    driver.close()


def counted(ncu: str, seconds: float) -> Iterator[Record]:
    """The GPU's counters of every kernel, by Nsight Compute. Nothing, and a line that says so, where it fails."""
    command = [
        *(ncu, "--csv", "--metrics", f"{NO_INSTRUCTION},{MISSES},{LOOKUPS}", "--kernel-name", "regex:^lospmm_[0-9]"),
        *(sys.executable, "-c", "from benchmarks.paper.fetch import launch_each; launch_each()"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stdout", None) or b""
        print(f"ncu counts nothing: {error}; {output!s:.500}", file=sys.stderr)
        return
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    found: dict[str, Record] = {}
    for one in csv.DictReader(lines):
        found.setdefault(one["ID"], {})[one["Metric Name"]] = float(one["Metric Value"].replace(",", ""))
    for (rows, iterations), values in zip(KERNELS, found.values(), strict=True):
        yield {"figure": "9 counted", "rows": rows, "iterations": iterations, **values}


def dense_iterations(one: Record) -> float:
    """NNC_P x (1 - sparsity), the paper's axis."""
    return float(one["iterations"]) * (1 - SPARSITY)


def at(records: Sequence[Record], rows: int, dense: float) -> Record:
    """That of so many rows whose axis is nearest to ``dense``."""
    mine = [one for one in records if one["rows"] == rows]
    return min(mine, key=lambda one: abs(dense_iterations(one) - dense))


def slowdown(records: Sequence[Record], rows: int, dense: float) -> float:
    """Time for an instruction there over that at STABLE."""
    there, stable = at(records, rows, dense), at(records, rows, STABLE)
    return float(there["micros"] / there["instructions"] / (stable["micros"] / stable["instructions"]))


def missed(one: Record) -> float:
    """The share of the lookups that missed."""
    return float(one[MISSES] / one[LOOKUPS])


def rows(records: Sequence[Record]) -> list[Row]:
    timed, counts = ([one for one in records if one["figure"] == name] for name in ("9", "9 counted"))
    told = []
    longest = max(ITERATIONS) * (1 - SPARSITY)
    sizes = f"{_list(ROWS)} rows"
    if counts:
        ends = ((missed(at(counts, count, dense)) for dense in (STABLE, longest)) for count in ROWS)
        shares = ", ".join(f"{stable:.0%} to {last:.0%}" for stable, last in ends)
        what = f"instruction cache misses, {STABLE} to {longest:.0f} dense iterations, {sizes}"
        told.append(Row(what, "constant", shares))
    ratios = ", ".join(f"{slowdown(timed, count, longest):.2f}" for count in ROWS)
    return [*told, Row(f"time per instruction at {longest:.0f} over that at {STABLE}, {sizes}", "1", ratios)]


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def plot(records: Sequence[Record], path: Path) -> None:
    timed, counts = ([one for one in records if one["figure"] == name] for name in ("9", "9 counted"))
    panels: list[tuple[str, Sequence[Record], Callable[[Record], float]]] = [
        ("nanoseconds for an instruction of the code", timed, lambda one: 1e3 * one["micros"] / one["instructions"])
    ]
    if counts:
        panels.insert(0, ("lookups of the instruction cache that missed, %", counts, lambda one: 100 * missed(one)))
    figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4.5), layout="constrained", squeeze=False)
    for panel, (label, found, value) in zip(axes[0], panels, strict=True):
        for count in ROWS:
            mine = [one for one in found if one["rows"] == count]
            panel.plot(
                [dense_iterations(one) for one in mine], [value(one) for one in mine], "o-", label=f"M = {count}"
            )
        panel.axvline(STABLE, color="gray", linestyle=":")
        panel.set_xlabel("NNC x (1 - sparsity)")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(f"Figure 9: N {N:,}, sparsity {SPARSITY}, tiles of M x {COLS}")
    figure.savefig(path, dpi=110)
    plt.close(figure)
