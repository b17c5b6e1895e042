"""B through shared memory or through registers: kernels of both kinds for the seven problems, and parts of them.

    python -m benchmarks.shared_ring [--out DIR]

needs an H200 or H100. Whole kernels are checked. Those without their copies or their multiply-adds compute nothing of
use, and are timed alone. Writes ``shared_ring.jsonl`` and prints a line per kernel.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ring_kernel import NAME, Kernel, Ring, build
from lospmm.build import build as build_now
from lospmm.build import for_emitter
from lospmm.gpu.driver import open_driver
from lospmm.gpu.timing import copies_beyond_l2, time_rotating
from lospmm.measure import Bench
from lospmm.model import Candidate, Problem, Schedule, TileSize
from lospmm.reorder import regroup
from lospmm.runtime.detect import detect_device
from lospmm.settings import settings
from lospmm.store import Store
from lospmm_datasets.synthetic import uniform

#: (m, k, n, sparsity), what was found to be fastest with B in registers, and rings.
CASES: tuple[tuple[tuple[int, int, int, float], tuple[TileSize, Schedule], tuple[Ring, ...]], ...] = (
    (
        (768, 768, 4096, 0.9),
        (TileSize(45, 608), Schedule(24, None, 2)),
        (
            Ring(45, 608, 16, 4, 12),
            Ring(48, 512, 16, 6, 6),
            Ring(48, 512, 16, 4, 6, multicast=2),
            Ring(64, 384, 16, 6, 8),
        ),
    ),
    (
        (768, 768, 16384, 0.9),
        (TileSize(97, 512), Schedule(16, None, 2)),
        (Ring(70, 704, 8, 4, 4), Ring(86, 608, 8, 8, 4), Ring(52, 992, 8, 6, 4), Ring(64, 704, 16, 4, 8, multicast=2)),
    ),
    (
        (3072, 768, 4096, 0.9),
        (TileSize(94, 512), Schedule(16, None, 0)),
        (Ring(70, 704, 16, 4, 4), Ring(60, 832, 16, 4, 4, 0), Ring(70, 704, 16, 4, 4, 0, multicast=2)),
    ),
    (
        (768, 768, 4096, 0.7),
        (TileSize(24, 1024), Schedule(24, None, 2, 128)),
        (Ring(35, 704, 8, 8, 8), Ring(35, 704, 16, 4, 8, multicast=2)),
    ),
    ((768, 768, 4096, 0.98), (TileSize(80, 320), Schedule(48, None, 2)), (Ring(80, 320, 16, 8, 12),)),
    (
        (256, 576, 12544, 0.9),
        (TileSize(45, 576), Schedule(32, None, 2, 128)),
        (Ring(43, 576, 16, 5, 6), Ring(43, 576, 16, 5, 6, multicast=2)),
    ),
    ((64, 576, 50176, 0.9), (TileSize(64, 192), Schedule(72, None, 2, 128)), (Ring(64, 192, 16, 6, 8),)),
)

#: Of which ring of a problem parts are timed: the first.
PARTS = ("copies", "multiply-adds")


def whole(problem: Problem, now: tuple[TileSize, Schedule], rings: tuple[Ring, ...], store: Store) -> Iterator[Any]:
    tile, schedule = now
    candidate = Candidate(tile, schedule, regroup(problem.matrix, [tile.rows])[tile.rows])
    with ThreadPoolExecutor(settings().workers) as pool, Bench(problem) as bench:
        kernels = [pool.submit(build, problem, ring, store) for ring in rings]
        built = build_now(for_emitter(problem, "sass"), candidate, "sass", store=store, workers=1)
        found = bench.measure(built.binary.cubin, built.program.name, built.launch)
        size = {"registers": built.binary.registers, "code_bytes": built.binary.code_bytes}
        yield {"b_in": "registers", **tile._asdict(), **asdict(schedule), **size, **_found(found)}
        for ring, future in zip(rings, kernels, strict=True):
            kernel = future.result()
            found = bench.measure(kernel.cubin, NAME, kernel.launch)
            yield {"b_in": "shared memory", **asdict(ring), **_size(kernel), **_found(found)}


def _size(kernel: Kernel) -> dict[str, int]:
    return {"registers": kernel.registers, "code_bytes": kernel.code_bytes}


def _found(found: Any) -> dict[str, Any]:
    if found.timing is None:
        return {"failure": found.failure}
    return {"micros": round(found.timing.micros, 2), "spread": round(found.timing.spread, 4)}


def parts(problem: Problem, ring: Ring, store: Store) -> Iterator[Any]:
    driver = open_driver()
    sizes = 4 * problem.matrix.k * problem.n, 4 * problem.matrix.m * problem.n
    copies = copies_beyond_l2(sum(sizes), driver.l2_bytes())
    places = [tuple(driver.allocate(size) for size in sizes) for _ in range(copies)]
    values = np.random.default_rng(0).uniform(-1, 1, size=sizes[0] // 4).astype(np.float32)
    for b, _ in places:
        driver.upload(b, values)
    for part in PARTS:
        kernel = build(problem, replace(ring, without=part), store)
        function = driver.load(kernel.cubin, NAME)

        def run(copy: int, function: Any = function, launch: Any = kernel.launch) -> None:
            driver.launch(function, launch, [np.uint64(place) for place in places[copy]])

        timing = time_rotating(driver, run, copies=copies)
        found = {"micros": round(timing.micros, 2), "spread": round(timing.spread, 4)}
        yield {"b_in": "shared memory", **asdict(replace(ring, without=part)), **_size(kernel), **found}
    for place in places:
        for address in place:
            driver.free(address)
    driver.close()


def records() -> Iterator[dict[str, Any]]:
    device = detect_device()
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        for (m, k, n, sparsity), now, rings in CASES:
            problem = Problem(uniform(m, k, sparsity, seed=0), n, device)
            sizes = {"device": device.name, "m": m, "k": k, "n": n, "sparsity": sparsity}
            for row in whole(problem, now, rings, store):
                yield {**sizes, **row}
            for row in parts(problem, rings[0], store):
                yield {**sizes, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with (out / "shared_ring.jsonl").open("w") as file:
        for row in records():
            print(json.dumps(row), file=file, flush=True)
            what = f"{row['m']} x {row['k']}, n {row['n']}, {row['sparsity']:.0%}, {row['rows']} x {row['cols']}"
            ring = (
                f"stages {row['stages']} x {row['stage_rows']}, multicast {row['multicast']}" if "stages" in row else ""
            )
            part = f"without {row['without']}" if row.get("without") else ""
            print(f"{what:44} {row['b_in']:14} {ring:30} {part:22} {row.get('micros', row.get('failure'))}", flush=True)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
