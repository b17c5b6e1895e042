"""Which kernels keep their time from load to load, and from GPU to GPU (docs/decisions/0015-small-rounds.md).

    python -m benchmarks.loads [--out DIR]

needs an H200 or H100. Kernels of one matrix, tile sizes near the fastest, each loaded LOADS times, in turns with the
others; of most not the load but what ran before decides (``benchmarks.before``). Writes ``loads.jsonl``, a line for
each, with the time of every load and the GPU.
"""

import os
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from benchmarks.checked import Operands
from benchmarks.harness import build
from benchmarks.recorded import Row, record
from lospmm.build import for_emitter
from lospmm.dtype import FLOAT32
from lospmm.gpu.driver import open_driver
from lospmm.gpu.timing import Effort
from lospmm.model import Candidate, Problem, Schedule, TileSize
from lospmm.reorder import regroup
from lospmm.runtime.detect import detect_device, own_gpu_id
from lospmm.store import Store
from lospmm_datasets.synthetic import uniform

SHAPE, SPARSITY = (768, 768, 4096), 0.9
ROWS, COLS = (43, 44, 45, 46, 48, 49, 50, 51, 52), (512, 544, 576, 608, 640)
SCHEDULE = Schedule(24, None, 2)
LOADS = 8
EFFORT = Effort(replays=7, warm_micros=1_000.0, launches=8)


def records() -> Iterator[Row]:
    driver, device, gpu = open_driver(), detect_device(), own_gpu_id()
    (m, k, n), workers = SHAPE, len(os.sched_getaffinity(0))
    problem = for_emitter(Problem(uniform(m, k, SPARSITY, seed=0), n, device), "sass")
    tilings = regroup(problem.matrix, ROWS)
    candidates = [Candidate(TileSize(*size), SCHEDULE, tilings[size[0]]) for size in product(ROWS, COLS)]
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        kernels = list(pool.map(partial(build, problem, store=Store(Path(folder))), candidates))
    operands = Operands(driver, problem.matrix, n, FLOAT32)
    micros: list[list[float]] = [[] for _ in kernels]
    for _ in range(LOADS):
        for kernel, times in zip(kernels, micros, strict=True):
            times.append(operands.time(kernel, effort=EFFORT)["micros"])
    operands.close()
    driver.close()
    for candidate, kernel, times in zip(candidates, kernels, micros, strict=True):
        yield {"device": device.name, "gpu": gpu, "m": m, "k": k, "n": n, "sparsity": SPARSITY,
               **candidate.tile._asdict(), **asdict(candidate.schedule), "tiles": len(candidate.tiling.tiles),
               "code_bytes": kernel.code_bytes, "micros": times}  # fmt: skip


def main() -> None:
    record("loads", records(), _shown, description=__doc__)


def _shown(row: Row) -> str:
    times = row["micros"]
    low, middle, high = min(times), statistics.median(times), max(times)
    return f"{row['rows']:3} x {row['cols']}, {row['tiles']} tiles: {low:6.2f}, median {middle:6.2f}, {high:6.2f} us"


if __name__ == "__main__":
    main()
