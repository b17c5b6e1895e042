"""What it is worth to load a kernel several times and keep the fastest copy (docs/measuring.md, "The fastest of
several loads").

    python -m benchmarks.placing [--out DIR] [--processes COUNT] [--commit HASH]

needs an H200 or H100. Each kernel is loaded LOADS times, all copies kept, in several processes. Every copy is timed in
rounds, in an order that is drawn anew: by one graph that is kept, by new graphs, with other B and C, behind a copy of
memory that leaves nothing of the kernel in the L2 cache; and the one that was the fastest at first once more, when all
others are unloaded. Writes ``placing.jsonl``, a line for each process, kernel and way, with ``micros`` by copy and
round, and prints what the choice of the fastest of so many is worth.
"""

import argparse
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels import ROOT, commit_of
from benchmarks.placing_table import Row, table
from lospmm.build import build, for_emitter
from lospmm.gpu.clocks import read_clocks
from lospmm.gpu.driver import Driver, Graph, open_driver
from lospmm.gpu.launcher import Launcher
from lospmm.gpu.timing import Effort, copies_beyond_l2, time_rotating, timing_of, warm_replays_left
from lospmm.model import Candidate, Compiled, Problem, Schedule, TileSize
from lospmm.reorder import regroup
from lospmm.runtime.detect import detect_device, own_gpu_id
from lospmm.store import Store
from lospmm_datasets.synthetic import uniform


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel: (m, k, n) and zeros of its problem, tile size and schedule. ``set`` says where it is from."""

    set: str
    gemm: tuple[int, int, int]
    sparsity: float
    tile: TileSize
    schedule: Schedule


#: What tuning chose for the seven problems, for some of the 41 shapes at 98 % in TF32, which are the same code, and two
#: kernels of ``benchmarks.loads`` whose loads differ much.
CASES = (
    Case("seven", (768, 768, 4096), 0.7, TileSize(32, 864), Schedule(16, None, 0, 128)),
    Case("seven", (768, 768, 4096), 0.9, TileSize(45, 608), Schedule(16, None, 4)),
    Case("seven", (768, 768, 4096), 0.98, TileSize(98, 256), Schedule(144, None, 4)),
    Case("seven", (3072, 768, 4096), 0.9, TileSize(97, 512), Schedule(16, None, 2)),
    Case("seven", (256, 576, 12544), 0.9, TileSize(47, 576), Schedule(24, None, 1)),
    Case("seven", (64, 576, 50176), 0.9, TileSize(64, 384), Schedule(48, None, 4, 128)),
    Case("seven", (768, 768, 16384), 0.9, TileSize(96, 512), Schedule(16, None, 2)),
    Case("shapes", (2304, 768, 4096), 0.98, TileSize(108, 352), Schedule(32, None, 2)),
    Case("shapes", (3072, 768, 4096), 0.98, TileSize(128, 384), Schedule(24, None, 4)),
    Case("shapes", (768, 3072, 4096), 0.98, TileSize(67, 384), Schedule(32, None, 1)),
    Case("shapes", (64, 576, 50176), 0.98, TileSize(64, 64), Schedule(72, None, 2, 128)),
    Case("shapes", (512, 256, 12544), 0.98, TileSize(131, 384), Schedule(24, None, 2)),
    Case("shapes", (256, 2304, 3136), 0.98, TileSize(20, 320), Schedule(72, None, 1, 128)),
    Case("shapes", (2048, 1024, 784), 0.98, TileSize(63, 224), Schedule(144, None, 0)),
    Case("shapes", (232, 232, 3136), 0.98, TileSize(18, 384), Schedule(32, None, 1)),
    Case("loads", (768, 768, 4096), 0.9, TileSize(48, 640), Schedule(24, None, 2)),
    Case("loads", (3072, 768, 4096), 0.9, TileSize(94, 512), Schedule(16, None, 0)),
)

LOADS, ROUNDS, FURTHER_ROUNDS = 16, 8, 3

#: As brief as a search's, with two replays more.
EFFORT = Effort(replays=7, warm_micros=1_000.0, launches=8)

#: A graph that is one among many may have to be sent to the GPU again.
WARM_REPLAYS = 2

#: Copied before each launch of the way ``behind``: more than an L2 cache has.
BEHIND_BYTES = 96 << 20


class Places:
    """B and C in as many copies as the L2 cache does not hold, somewhere."""

    def __init__(self, driver: Driver, case: Case, spacer: int = 0) -> None:
        m, k, n = case.gemm
        self.driver = driver
        sizes = 4 * k * n, 4 * m * n
        self.held = [driver.allocate(spacer)] if spacer else []
        count = copies_beyond_l2(sum(sizes), driver.l2_bytes())
        values = np.random.default_rng(0).uniform(-1, 1, size=k * n).astype(np.float32)
        self.pairs = []
        for _ in range(count):
            b, c = (driver.allocate(size) for size in sizes)
            driver.upload(b, values)
            self.pairs.append((b, c))
            self.held += [b, c]

    def free(self) -> None:
        for address in self.held:
            self.driver.free(address)


def graph_of(driver: Driver, launcher: Launcher, places: Places, before: Callable[[], None] | None = None) -> Graph:
    """Whole rounds of the copies, each launch behind what comes ``before`` it."""
    pairs = places.pairs * -(-EFFORT.launches // len(places.pairs))

    def enqueue() -> None:
        for b, c in pairs:
            if before is not None:
                before()
            launcher(driver.stream, b, c)

    graph = driver.capture(enqueue)
    return Graph((graph, len(pairs)))


def micros_of(driver: Driver, counted: Graph) -> float:
    graph, launches = counted.handle
    warm = [driver.replay_micros(graph) for _ in range(WARM_REPLAYS)]
    for _ in range(warm_replays_left(warm, EFFORT.warm_micros)):
        driver.replay_micros(graph)
    times = [driver.replay_micros(graph) / launches for _ in range(EFFORT.replays)]
    return round(timing_of(times).micros, 3)


def discard(driver: Driver, counted: Graph) -> None:
    driver.discard(counted.handle[0])


def by_rounds(count: int, rounds: int, micros: Callable[[int], float], order: random.Random) -> list[list[float]]:
    """Of each of ``count`` copies the times of all rounds."""
    times: list[list[float]] = [[] for _ in range(count)]
    for _ in range(rounds):
        for copy in order.sample(range(count), count):
            times[copy].append(micros(copy))
    return times


def records(driver: Driver, case: Case, kernel: Compiled) -> Iterator[Row]:
    order, shape = random.Random(0), kernel.launch
    places = Places(driver, case)
    free, started = driver.memory_bytes()[0], time.monotonic()
    copies = [Launcher(kernel.cubin, kernel.entry, shape) for _ in range(LOADS)]
    load = {"load_ms": round((time.monotonic() - started) * 1e3 / LOADS, 3),
            "load_bytes": (free - driver.memory_bytes()[0]) // LOADS}  # fmt: skip

    def anew(copy: int, places: Places, before: Callable[[], None] | None = None) -> float:
        graph = graph_of(driver, copies[copy], places, before)
        try:
            return micros_of(driver, graph)
        finally:
            discard(driver, graph)

    for launcher in copies:
        launcher(driver.stream, *places.pairs[0])  # what is loaded at the first launch cannot be captured
    anew(0, places)
    kept = [graph_of(driver, launcher, places) for launcher in copies]
    started = time.monotonic()
    micros = by_rounds(LOADS, ROUNDS, lambda copy: micros_of(driver, kept[copy]), order)
    yield {"way": "kept", "micros": micros, **load,
           "timing_ms": round((time.monotonic() - started) * 1e3 / LOADS / ROUNDS, 3)}  # fmt: skip
    for graph in kept:
        discard(driver, graph)
    started = time.monotonic()
    again = by_rounds(LOADS, FURTHER_ROUNDS, lambda copy: anew(copy, places), order)
    yield {"way": "anew", "micros": again,
           "timing_ms": round((time.monotonic() - started) * 1e3 / LOADS / FURTHER_ROUNDS, 3)}  # fmt: skip
    elsewhere = Places(driver, case, spacer=5 << 20)
    yield {"way": "elsewhere", "micros": by_rounds(LOADS, FURTHER_ROUNDS, lambda copy: anew(copy, elsewhere), order)}
    elsewhere.free()
    here, there = driver.allocate(BEHIND_BYTES), driver.allocate(BEHIND_BYTES)

    def before() -> None:
        driver.copy(there, here, BEHIND_BYTES)

    micros_before = time_rotating(driver, lambda _: before(), copies=1, effort=EFFORT).micros
    behind = by_rounds(LOADS, FURTHER_ROUNDS, lambda copy: anew(copy, places, before) - micros_before, order)
    yield {"way": "behind", "micros": [[round(one, 3) for one in times] for times in behind]}
    driver.free(here)
    driver.free(there)
    chosen = min(range(LOADS), key=lambda copy: sum(micros[copy][:2]))
    for copy, launcher in enumerate(copies):
        if copy != chosen:
            launcher.unload()
    yield {"way": "alone", "chosen": chosen, "micros": [[anew(chosen, places) for _ in range(FURTHER_ROUNDS)]]}
    copies[chosen].unload()
    places.free()


def problem_of(gemm: tuple[int, int, int], sparsity: float) -> Problem:
    """On this machine's GPU."""
    m, k, n = gemm
    return for_emitter(Problem(uniform(m, k, sparsity, seed=0), n, detect_device()), "sass")


def candidate_of(case: Case) -> tuple[Problem, Candidate]:
    """On this machine's GPU."""
    problem = problem_of(case.gemm, case.sparsity)
    tiling = regroup(problem.matrix, [case.tile.rows])[case.tile.rows]
    return problem, Candidate(case.tile, case.schedule, tiling)


def built(case: Case, folder: Path) -> Compiled:
    problem, candidate = candidate_of(case)
    return build(problem, candidate, "sass", store=Store(folder), workers=1).compiled


def build_all(path: Path) -> None:
    """The kernels of all cases, pickled."""
    with tempfile.TemporaryDirectory() as folder:
        workers = min(len(CASES), len(os.sched_getaffinity(0)))
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            kernels = list(pool.map(partial(built, folder=Path(folder)), CASES))
    path.write_bytes(pickle.dumps(kernels))


def child(process: int, kernels: Path) -> Iterator[Row]:
    driver, device, gpu = open_driver(), detect_device(), own_gpu_id()
    for case, kernel in zip(CASES, pickle.loads(kernels.read_bytes()), strict=True):
        m, k, n = case.gemm
        about = {"device": device.name, "gpu": gpu, "process": process, "set": case.set, "m": m, "k": k, "n": n,
                 "sparsity": case.sparsity, **case.tile._asdict(), **asdict(case.schedule),
                 "cubin_bytes": len(kernel.cubin)}  # fmt: skip
        for row in records(driver, case, kernel):
            clocks = read_clocks(driver.bus_id())
            yield {**about, **row, "sm_mhz": None if clocks is None else clocks.sm_mhz}
    driver.close()


def lines_of(command: Sequence[str], seconds: float) -> Iterator[str]:
    """What a child prints, until it ends or its time is up."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as running:
        assert running.stdout is not None
        ends = time.monotonic() + seconds
        with suppress(ProcessLookupError):
            for line in running.stdout:
                yield line
                if time.monotonic() > ends:
                    running.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120.0, help="that a process may take")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kernels", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        for row in child(options.child, options.kernels):
            print(json.dumps(row), flush=True)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    commit = options.commit or commit_of(ROOT)
    with tempfile.TemporaryDirectory() as folder, (options.out / "placing.jsonl").open("w") as file:
        kernels = Path(folder) / "kernels"
        started = time.monotonic()
        build_all(kernels)
        print(f"built in {time.monotonic() - started:.0f} s", flush=True)
        for process in range(options.processes):
            command = (sys.executable, "-m", "benchmarks.placing", "--child", str(process), "--kernels", str(kernels))
            for line in lines_of(command, options.seconds):
                rows.append({**json.loads(line), "commit": commit})
                print(json.dumps(rows[-1]), file=file, flush=True)
            print(f"process {process}: {time.monotonic() - started:.0f} s", flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
