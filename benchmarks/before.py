"""Whether a kernel's time is decided by the memory that its code was loaded to, or by what ran before it.

    python -m benchmarks.before [--out DIR] [--turns COUNT] [--commit HASH]

needs an H200 or H100. Each kernel is loaded COPIES times, all kept, with a graph for each, so that nothing is loaded or
allocated any more. Then, in an order that is drawn: something is run, or nothing (``setters``), and one copy of one
kernel is timed. After every second timing blocks that fill an SM each say to which SMs the GPU gives the blocks of a
grid now. Writes ``before.jsonl``, a line for each timing and one for each such order, and prints how much of what times
differ by goes with the copy, with what ran before, and with the order.
"""

import argparse
import hashlib
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.before_table import Row, table
from benchmarks.gpcs import SHARED_BYTES, report
from benchmarks.kernels import ROOT, commit_of
from benchmarks.placing import Case, Places, built, discard, graph_of, micros_of
from lospmm.codegen.emission import Emission
from lospmm.gpu.driver import Driver, Function, open_driver
from lospmm.gpu.launcher import Launcher
from lospmm.model import Launch, Schedule, TileSize
from lospmm.runtime.detect import detect_device, own_gpu_id
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel

#: Kernels of ``benchmarks.loads`` and ``benchmarks.reloads``, whose loads were seen to differ.
CASES = (
    Case("loads", (768, 768, 4096), 0.9, TileSize(48, 512), Schedule(24, None, 2)),
    Case("loads", (768, 768, 4096), 0.9, TileSize(48, 640), Schedule(24, None, 2)),
    Case("loads", (768, 768, 4096), 0.9, TileSize(51, 608), Schedule(24, None, 2)),
    Case("loads", (768, 768, 4096), 0.9, TileSize(45, 608), Schedule(24, None, 2)),
    Case("reloads", (768, 768, 4096), 0.7, TileSize(31, 896), Schedule(16, None, 2, 128)),
    Case("reloads", (3072, 768, 4096), 0.9, TileSize(94, 512), Schedule(16, None, 0)),
)

COPIES = 4

#: Of the timings, the share that the order of SMs is asked for after: asking may change it.
PROBED = 0.5

#: Blocks that fill an SM each, launched before a timing.
FILLING = (1, 2, 16, 66, 132, 200)

#: Blocks of one thread that do nothing.
EMPTY = (1, 132)

NOTHING = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry nothing () { exit; }
"""

Setters = Mapping[str, Callable[[], None]]


def loaded(driver: Driver, text: str, entry: str, store: Store) -> Function:
    emission = Emission("ptx", entry, text, (text,))
    return driver.load(compile_kernel(emission, arch="sm_90", registers=32, store=store, workers=1).cubin, entry)


class Orders:
    """To which SMs blocks go that fill one each; every order that was seen, by its name."""

    def __init__(self, driver: Driver, store: Store) -> None:
        self.driver, self.sms = driver, detect_device().sms
        self.function = loaded(driver, report(1), "report", store)
        self.out = driver.allocate(4 * 1024)
        self.seen: dict[str, list[int]] = {}

    def fill(self, blocks: int) -> None:
        shape = Launch((blocks, 1, 1), 1024, SHARED_BYTES)
        self.driver.launch(self.function, shape, [np.uint64(self.out)])
        self.driver.synchronize()

    def now(self) -> str:
        self.fill(self.sms)
        found = np.zeros(self.sms, np.uint32)
        self.driver.download(found, self.out)
        name = hashlib.sha256(found.tobytes()).hexdigest()[:8]
        self.seen.setdefault(name, found.tolist())
        return name


def setters(driver: Driver, orders: Orders, store: Store, image: bytes, entry: str, shape: Launch) -> Setters:
    nothing = loaded(driver, NOTHING, "nothing", store)
    scratch = driver.allocate(64 << 20)

    def empty(blocks: int) -> None:
        driver.launch(nothing, Launch((blocks, 1, 1), 32), [])
        driver.synchronize()

    def memset() -> None:
        driver.fill(scratch, 0, 16 << 20)
        driver.synchronize()

    def load() -> None:
        Launcher(image, entry, shape).unload()

    return {
        "-": lambda: None,
        "idle for 20 ms": lambda: time.sleep(0.02),
        **{f"{blocks} blocks that fill an SM": partial(orders.fill, blocks) for blocks in FILLING},
        **{f"{blocks} empty blocks": partial(empty, blocks) for blocks in EMPTY},
        "a memset": memset,
        "a module loaded and unloaded": load,
    }


def records(turns: int) -> Iterator[Row]:
    driver, device, order = open_driver(), detect_device(), random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        workers = min(len(CASES), len(os.sched_getaffinity(0)))
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            kernels = list(pool.map(partial(built, folder=Path(folder)), CASES))
        store = Store(Path(folder))
        orders = Orders(driver, store)
        before = setters(driver, orders, store, kernels[0].cubin, kernels[0].entry, kernels[0].launch)
        about = {"device": device.name, "gpu": own_gpu_id()}
        works = []
        for case, kernel in zip(CASES, kernels, strict=True):
            places = Places(driver, case)
            copies = [Launcher(kernel.cubin, kernel.entry, kernel.launch) for _ in range(COPIES)]
            for launcher in copies:
                launcher(driver.stream, *places.pairs[0])
            works.append([graph_of(driver, launcher, places) for launcher in copies])
        previous = "-"
        for turn in range(turns):
            number, copy = order.randrange(len(CASES)), order.randrange(COPIES)
            setter, case = order.choice(list(before)), CASES[number]
            before[setter]()
            micros = micros_of(driver, works[number][copy])
            seen = orders.now() if order.random() < PROBED else None
            m, k, n = case.gemm
            yield {**about, "turn": turn, "m": m, "k": k, "n": n, "sparsity": case.sparsity, **case.tile._asdict(),
                   "copy": copy, "previous": previous, "before": setter, "micros": micros, "order": seen}  # fmt: skip
            previous = "probe" if seen else f"{case.tile.rows} x {case.tile.cols}"
        for graphs in works:
            for graph in graphs:
                discard(driver, graph)
        for name, sms in orders.seen.items():
            yield {**about, "order": name, "sms": sms}
    driver.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--turns", type=int, default=4000)
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows, commit = [], options.commit or commit_of(ROOT)
    with (options.out / "before.jsonl").open("w") as file:
        for row in records(options.turns):
            rows.append({**row, "commit": commit})
            print(json.dumps(rows[-1]), file=file, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
