"""How long machine code takes to be written, and the memory that it takes, on one core.

    python -m benchmarks.emission [--out DIR]

takes 768 x 768 at 90 % (59 k nonzeros) and 3072 x 768 at 70 % (708 k) for an H200 and N 4096, each in a process of its
own that is held to one core, and times the steps from a candidate to its cubin: the program of each tile
(``lospmm.codegen.lower``), its schedule, its bits, the graft, and the listing. Each figure is the best of ``REPEATS``,
what the machine can do when nothing else runs on it; the median is beside it. Peaks are the whole process, interpreter
and libraries included. ptxas has the prologue to compile, once for each launch shape of a matrix: that time is apart.
Writes ``emission.jsonl`` and prints a table.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lospmm.codegen import emit, source_of
from lospmm.codegen.lower import lower
from lospmm.codegen.sass.fields import encode
from lospmm.codegen.sass.generations import generation_of
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import regroup
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.cubin import graft
from lospmm.tuning.build import for_emitter
from lospmm_datasets.synthetic import uniform

#: m, k, share of zeros, and the tile that prototypes were fastest with on an H200.
CASES = ((768, 768, 0.9, TileSize(48, 512)), (3072, 768, 0.7, TileSize(24, 512)))
COLUMNS = 4096
SCHEDULE = Schedule(prefetch=48)
DEVICE = "h200"
REPEATS = 5

Made = TypeVar("Made")


def peak_bytes() -> int:
    """The most resident memory that this process has had (Linux: VmHWM; getrusage counts a parent's in)."""
    (kibibytes,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kibibytes) << 10


def processor() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def timed(times: list[float], work: Callable[[], Made]) -> Made:
    started = time.perf_counter()
    made = work()
    times.append(time.perf_counter() - started)
    return made


def one(number: int) -> dict[str, Any]:
    """The line of a case, measured in this process."""
    m, k, sparsity, size = CASES[number]
    matrix = uniform(m, k, sparsity, seed=0)
    problem = for_emitter(Problem(matrix, COLUMNS, DEVICES[DEVICE]), "sass")
    arch = problem.device.arch
    candidate = UnrolledPlan(size, SCHEDULE, regroup(matrix, [size.rows])[size.rows])
    with tempfile.TemporaryDirectory() as directory:
        first = emit(lower(problem, candidate), "sass", arch)
        store = Store(Path(directory))
        registers, seconds = problem.device.registers_per_thread, list[float]()
        compiled = partial(compile_kernel, first, arch=arch, registers=registers, store=store, workers=1)
        binary = timed(seconds, compiled)
        prologue = next(iter(store.entries()))
        kept = store.get(prologue.kind, prologue.key)
        assert kept is not None
    del first
    steps: dict[str, list[float]] = {name: [] for name in ("program", "schedule", "encode", "graft", "listing")}
    peaks = {}
    for _ in range(REPEATS):
        program = timed(steps["program"], lambda: lower(problem, candidate))
        emission = timed(steps["schedule"], lambda program=program: emit(program, "sass", arch))
        machine = emission.machine
        assert machine is not None
        timed(steps["encode"], lambda machine=machine: encode(machine.form, generation_of(arch)))
        cubin = timed(steps["graft"], lambda machine=machine, name=emission.entry: graft(kept["unit.o"], machine, name))
        assert cubin == binary.cubin
    peaks["cubin"] = peak_bytes()
    for _ in range(REPEATS):
        timed(steps["listing"], lambda: source_of(program, emission, arch))
    peaks["listing"] = peak_bytes()
    assert machine is not None
    return {
        "m": m,
        "k": k,
        "n": COLUMNS,
        "nnz": matrix.nnz,
        "tile": {"rows": size.rows, "cols": size.cols, "prefetch": SCHEDULE.prefetch},
        "instructions": len(machine.form),
        "cubin_bytes": len(binary.cubin),
        "seconds": {name: round(min(times), 4) for name, times in steps.items()},
        "median_seconds": {name: round(statistics.median(times), 4) for name, times in steps.items()},
        "repeats": REPEATS,
        "prologue_seconds": round(seconds[0], 3),
        "peak_bytes": peaks,
        "toolchain": binary.toolchain.split(" (")[0],
        "processor": processor(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
    }


def alone(number: int) -> dict[str, Any]:
    """``one`` in a process that has one core, and libraries that start no threads. Raises CalledProcessError."""
    core = min(os.sched_getaffinity(0))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LOSPMM_WORKERS": "1"}
    command = [sys.executable, "-m", "benchmarks.emission", "--case", str(number), "--core", str(core)]
    finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(finished.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="print one line, measured in this process")
    parser.add_argument("--core", type=int, help="with --case: the core to stay on")
    arguments = parser.parse_args()
    if arguments.case is not None:
        if arguments.core is not None:
            os.sched_setaffinity(0, {arguments.core})
        print(json.dumps(one(arguments.case)))
        return
    lines = [alone(number) for number in range(len(CASES))]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "emission.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in lines:
        seconds = line["seconds"]
        steps = "  ".join(f"{name} {value * 1000:.0f} ms" for name, value in seconds.items())
        total = seconds["program"] + seconds["schedule"] + seconds["graft"]
        print(
            f"{line['m']} x {line['k']} {line['nnz']:8,} nonzeros: {steps}; cubin in {total * 1000:.0f} ms, "
            f"peak {line['peak_bytes']['cubin'] >> 20} MiB, with the listing {line['peak_bytes']['listing'] >> 20} MiB"
        )


if __name__ == "__main__":
    main()
