"""The analytic estimate against the clock of a GPU, and ptxas -O1 against -O3.

    python -m benchmarks.estimate_on_gpu [--out DIR] [--sample 24] [--seed 0]

needs an NVIDIA GPU of the device table. For each problem it times the candidate that the estimate puts first, at both
levels of ptxas, and ``--sample`` candidates drawn at random from the same space, each checked against float64 on
poisoned memory. A problem runs in a process of its own with a time limit. Times are medians of CUDA graph replays
over rotating copies of B and C larger than twice the L2 cache, so that B comes from memory. Adds to
``estimate_on_gpu.jsonl`` and prints, per problem, the choice, the best of the sample and the rank correlation.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver
from scipy.stats import spearmanr

from benchmarks.levels import IN_USE, ptxas_level
from lospmm.codegen import emit
from lospmm.estimate import estimate_micros
from lospmm.ir import launch
from lospmm.lower import lower
from lospmm.model import Candidate, Launch, Problem, Schedule, TileSize
from lospmm.reorder import regroup
from lospmm.runtime.detect import detect_device
from lospmm.search import search
from lospmm.settings import settings
from lospmm.space import widen
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm.verify import compare
from lospmm_datasets.synthetic import uniform

PROBLEMS = [
    (768, 768, 4096, 0.7),
    (768, 768, 4096, 0.9),
    (768, 768, 4096, 0.98),
    (3072, 768, 4096, 0.9),
    (256, 576, 12544, 0.9),
    (64, 576, 50176, 0.9),
]
#: Timed before, with machine code written by hand: M1, threads, loads in flight.
KNOWN = {(768, 768, 4096, 0.9): [(48, 512, 48), (32, 256, 16)], (768, 768, 4096, 0.98): [(96, 256, 72)]}
REPLAYS, LAUNCHES = 15, 20
PROBLEM_SECONDS = 240


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call. Raises RuntimeError with the driver's name of the error."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(str(status))
    return values[0] if len(values) == 1 else tuple(values)


class Gpu:
    """One context, one stream, and copies of B and C that together leave nothing of B in the L2 cache."""

    def __init__(self, problem: Problem) -> None:
        check(driver.cuInit(0))
        check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))))
        self.stream = check(driver.cuStreamCreate(0))
        m, k, n = problem.matrix.m, problem.matrix.k, problem.n
        self.b = np.random.default_rng(0).uniform(-1, 1, size=(k, n)).astype(np.float32)
        self.c = np.empty((m, n), dtype=np.float32)
        copies = max(2, int(3 * problem.device.l2_bytes // (self.b.nbytes + self.c.nbytes)) + 1)
        self.buffers = [
            (check(driver.cuMemAlloc(self.b.nbytes)), check(driver.cuMemAlloc(self.c.nbytes))) for _ in range(copies)
        ]
        for b, _ in self.buffers:
            check(driver.cuMemcpyHtoD(b, self.b.ctypes.data, self.b.nbytes))

    def run(self, function: Any, shape: Launch, buffers: tuple[Any, Any]) -> None:
        pointers = np.array([int(pointer) for pointer in buffers], dtype=np.uint64)
        addresses = np.array([pointers.ctypes.data, pointers.ctypes.data + 8], dtype=np.uint64)
        check(
            driver.cuLaunchKernel(
                function, *shape.grid, 1, shape.block, 1, 1, shape.shared_bytes, self.stream, addresses.ctypes.data, 0
            )
        )

    def result(self, function: Any, shape: Launch) -> np.ndarray[Any, np.dtype[np.float32]]:
        _, c = self.buffers[0]
        check(driver.cuMemsetD8(c, 0xFF, self.c.nbytes))  # NaN
        self.run(function, shape, self.buffers[0])
        check(driver.cuStreamSynchronize(self.stream))
        check(driver.cuMemcpyDtoH(self.c.ctypes.data, c, self.c.nbytes))
        return self.c

    def micros(self, function: Any, shape: Launch) -> tuple[float, float]:
        """Median microseconds of a launch, and the relative spread between the quartiles."""
        check(driver.cuStreamBeginCapture(self.stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
        launches = max(LAUNCHES, len(self.buffers))
        for number in range(launches):
            self.run(function, shape, self.buffers[number % len(self.buffers)])
        graph = check(driver.cuGraphInstantiate(check(driver.cuStreamEndCapture(self.stream)), 0))
        start, end = check(driver.cuEventCreate(0)), check(driver.cuEventCreate(0))
        times = []
        for _ in range(REPLAYS + 3):
            check(driver.cuEventRecord(start, self.stream))
            check(driver.cuGraphLaunch(graph, self.stream))
            check(driver.cuEventRecord(end, self.stream))
            check(driver.cuEventSynchronize(end))
            times.append(1000 * check(driver.cuEventElapsedTime(start, end)) / launches)
        low, median, high = statistics.quantiles(times[3:], n=4)
        return median, (high - low) / median


def candidates_of(
    problem: Problem, key: tuple[int, int, int, float], sample: int, seed: int
) -> list[tuple[str, Candidate]]:
    choice = search(problem, estimate_micros, 1, Stages(), workers=settings().workers)
    rng = random.Random(seed)
    pool = [wider for survivor in choice.space.survivors for wider in widen(problem, survivor)]
    found = [("choice", choice.winner), ("choice -O3", choice.winner)]
    for rows, cols, prefetch in KNOWN.get(key, []):
        tiling = regroup(problem.matrix, [rows])[rows]
        found.append(("known", Candidate(TileSize(rows, cols), Schedule(prefetch), tiling)))
    return found + [("sample", candidate) for candidate in rng.sample(pool, min(sample, len(pool)))]


def timed(gpu: Gpu, problem: Problem, what: str, candidate: Candidate, directory: Path) -> dict[str, Any]:
    program = lower(problem, candidate)
    level = "-O3" if what.endswith("-O3") else IN_USE
    with ptxas_level(level):
        binary = compile_kernel(
            emit(program, "ptx", problem.device.arch),
            arch=problem.device.arch,
            registers=program.registers,
            store=Store(directory),
            workers=settings().workers,
        )
    module = check(driver.cuModuleLoadData(binary.cubin))
    function = check(driver.cuModuleGetFunction(module, program.name.encode()))
    shape = launch(program)
    columns = np.arange(problem.n)
    error = compare(problem.matrix, columns, gpu.b, gpu.result(function, shape))
    micros, spread = gpu.micros(function, shape)
    schedule = candidate.schedule
    record = {
        "m": problem.matrix.m,
        "k": problem.matrix.k,
        "n": problem.n,
        "nnz": problem.matrix.nnz,
        "device": problem.device.name,
        "what": what,
        "ptxas": level,
        "rows": candidate.tile.rows,
        "cols": candidate.tile.cols,
        "prefetch": schedule.prefetch,
        "order": schedule.order,
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes,
        "compile_seconds": round(binary.compile_seconds, 3),
        "estimated_micros": round(float(estimate_micros(problem, [candidate])[0]), 2),
        "micros": round(micros, 2),
        "spread": round(spread, 4),
        "max_relative_error": error,
    }
    check(driver.cuModuleUnload(module))
    return record


def run_problem(number: int, sample: int, seed: int, out: Path) -> None:
    key = PROBLEMS[number]
    m, k, n, sparsity = key
    problem = Problem(uniform(m, k, sparsity, seed=0), n, detect_device())
    gpu = Gpu(problem)
    with tempfile.TemporaryDirectory() as directory, out.open("a") as results:
        for what, candidate in candidates_of(problem, key, sample, seed):
            print(json.dumps(timed(gpu, problem, what, candidate, Path(directory))), file=results, flush=True)


def summary(records: list[dict[str, Any]]) -> str:
    first = records[0]
    times = {what: [r["micros"] for r in records if r["what"] == what] for what in {r["what"] for r in records}}
    sample = [r for r in records if r["what"] == "sample"]
    rank = spearmanr([r["estimated_micros"] for r in sample], [r["micros"] for r in sample]).statistic if sample else 0
    return (
        f"{first['m']:5} {first['k']:5} {first['n']:6} {first['nnz']:8,}  choice {times['choice'][0]:7.1f}"
        f"  estimated {first['estimated_micros']:7.1f}  -O3 {times.get('choice -O3', [0])[0]:7.1f}"
        f"  best of {len(sample)} {min(times.get('sample', [0])):7.1f}  rank correlation {rank:5.2f}"
        f"  worst error {max(r['max_relative_error'] for r in records):.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--sample", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0, help="draws the sample")
    parser.add_argument("--problem", type=int, help="run this problem alone, in this process")
    arguments = parser.parse_args()
    out = arguments.out / "estimate_on_gpu.jsonl"
    if arguments.problem is not None:
        run_problem(arguments.problem, arguments.sample, arguments.seed, out)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    before = len(out.read_text().splitlines()) if out.exists() else 0
    failed = 0
    for number in range(len(PROBLEMS)):
        command = [sys.executable, "-m", "benchmarks.estimate_on_gpu", "--out", str(arguments.out)]
        command += ["--sample", str(arguments.sample), "--seed", str(arguments.seed), "--problem", str(number)]
        try:
            failed += subprocess.run(command, timeout=PROBLEM_SECONDS).returncode != 0
        except subprocess.TimeoutExpired:
            failed += 1
            print(f"problem {number}: stopped after {PROBLEM_SECONDS} s", file=sys.stderr)
    records = [json.loads(line) for line in out.read_text().splitlines()[before:]]
    for m, k, n, sparsity in PROBLEMS:
        nnz = uniform(m, k, sparsity, seed=0).nnz
        if mine := [r for r in records if (r["m"], r["k"], r["n"], r["nnz"]) == (m, k, n, nnz)]:
            print(summary(mine))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
