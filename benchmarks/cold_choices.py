"""Whether another kernel is the fastest where its code has left the L2 cache (docs/decisions/0030).

    python -m benchmarks.cold_choices [--out DIR]

needs an H200 or H100. Of each problem the kernels that a search times first are built: what the rank model puts first,
and the first of these in each column group. All are timed in two ways: one launch after
another, as a search does it, with B from memory and the code in the L2 cache; and as a layer of a network, behind an
activation that reads and writes more than the cache has and another that writes B. Of the latter the time of both
activations is taken off. Writes ``cold_choices.jsonl``, a line for each kernel with ``micros`` by way and turn.
"""

import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.families_unrolled import shortlist
from benchmarks.harness import Row, problem_of, record
from lospmm.codegen.emission import Emission
from lospmm.errors import LospmmError
from lospmm.families.candidate import unrolled
from lospmm.gpu.detect import detect_device
from lospmm.gpu.driver import open_driver
from lospmm.gpu.launcher import Launcher
from lospmm.gpu.protocol import Driver
from lospmm.gpu.timing import Effort, copies_beyond_l2, time_rotating
from lospmm.problem.problem import Launch
from lospmm.space.candidates import UnrolledPlan
from lospmm.store import Store
from lospmm.toolchain.compile import Compiled, compile_kernel
from lospmm.tuning.build import build

#: The seven problems, BERT-base's other one, and some of the 41 shapes.
PROBLEMS = (
    *(((768, 768, 4096), sparsity) for sparsity in (0.7, 0.9, 0.98)),
    *((gemm, 0.9) for gemm in ((3072, 768, 4096), (256, 576, 12544), (64, 576, 50176), (768, 768, 16384))),
    *(((768, 3072, 4096), sparsity) for sparsity in (0.9, 0.98)),
    *((gemm, 0.95) for gemm in ((256, 2304, 3136), (1024, 256, 3136), (512, 128, 12544), (2048, 512, 784))),
    *((gemm, 0.98) for gemm in ((2048, 1024, 784), (1024, 512, 3136), (3072, 768, 4096))),
)

#: That the rank model puts first; of the first of them each order of blocks is timed too, and what is made of a winner.
LISTED, VARIED = 22, 6

#: ``Schedule.column_group``.
GROUPS = (0, 1, 2, 4)

TURNS = 4
EFFORT = Effort(replays=5, warm_micros=600.0, launches=8)

#: Read and written before each launch of the way "network".
FLUSHED_BYTES = 96 << 20

#: Leaky ReLU of four elements to a thread.
ACTIVATION = (
    """
.version 8.0
.target sm_90
.address_size 64
.visible .entry activation (.param .u64 from, .param .u64 to, .param .u32 count)
{
.reg .pred %p;
.reg .b32 %block, %threads, %thread, %count;
.reg .b64 %at, %from, %to;
.reg .f32 %x<4>, %y<4>;
mov.u32 %block, %ctaid.x;
mov.u32 %threads, %ntid.x;
mov.u32 %thread, %tid.x;
mad.lo.u32 %thread, %block, %threads, %thread;
ld.param.u32 %count, [count];
setp.ge.u32 %p, %thread, %count;
@%p exit;
ld.param.u64 %from, [from];
ld.param.u64 %to, [to];
mul.wide.u32 %at, %thread, 16;
add.s64 %from, %from, %at;
add.s64 %to, %to, %at;
ld.global.v4.f32 {%x0, %x1, %x2, %x3}, [%from];
"""
    + "".join(f"mul.f32 %y{i}, %x{i}, 0f3DCCCCCD;\nmax.f32 %x{i}, %x{i}, %y{i};\n" for i in range(4))
    + """
st.global.v4.f32 [%to], {%x0, %x1, %x2, %x3};
exit;
}
"""
)
ACTIVATION_THREADS = 256

WAYS = ALONE, NETWORK = "one after another", "network"


class Work(NamedTuple):
    gemm: tuple[int, int, int]
    sparsity: float
    candidate: UnrolledPlan


def work_of(gemm: tuple[int, int, int], sparsity: float) -> list[Work]:
    problem = problem_of(gemm, sparsity)
    listed = shortlist(problem, LISTED)
    first = listed[:VARIED]
    grouped = [replace(one, schedule=replace(one.schedule, column_group=group)) for one in first for group in GROUPS]
    every = {(one.tile, one.schedule): one for one in (*listed, *grouped)}
    return [Work(gemm, sparsity, one) for one in every.values()]


def built(work: Work, folder: str) -> Compiled | str:
    """Or why there is none."""
    problem = problem_of(work.gemm, work.sparsity)
    try:
        return build(problem, unrolled(work.candidate), "sass", store=Store(Path(folder)), workers=1).compiled
    except LospmmError as error:
        return f"{type(error).__name__}: {error}"


class Places:
    """B and C in as many copies as the L2 cache does not hold."""

    def __init__(self, driver: Driver, gemm: tuple[int, int, int]) -> None:
        m, k, n = gemm
        self.driver = driver
        sizes = 4 * k * n, 4 * m * n
        values = np.random.default_rng(0).uniform(-1, 1, size=k * n).astype(np.float32)
        count = copies_beyond_l2(sum(sizes), driver.l2_bytes())
        self.pairs = [(driver.allocate(sizes[0]), driver.allocate(sizes[1])) for _ in range(count)]
        for b, _ in self.pairs:
            driver.upload(b, values)

    def free(self) -> None:
        for pair in self.pairs:
            for address in pair:
                self.driver.free(address)


def activation(driver: Driver, size: int, store: Store) -> Callable[[int, int], None]:
    """What puts one on the stream that reads ``size`` bytes from one address and writes as many to another."""
    emission = Emission("ptx", "activation", ACTIVATION, (ACTIVATION,))
    cubin = compile_kernel(emission, arch="sm_90", registers=32, store=store, workers=1).cubin
    function, count = driver.load(cubin, "activation"), size // 16
    shape = Launch((-(-count // ACTIVATION_THREADS), 1, 1), ACTIVATION_THREADS)
    return lambda start, end: driver.launch(function, shape, (np.uint64(start), np.uint64(end), np.uint32(count)))


class Ways:
    """What is launched on a driver's stream in each way."""

    def __init__(self, driver: Driver, gemm: tuple[int, int, int], store: Store) -> None:
        self.driver = driver
        self.places = Places(driver, gemm)
        _, k, n = gemm
        self._b_bytes = 4 * k * n
        self._activation = activation(driver, self._b_bytes, store)
        self._flush = activation(driver, FLUSHED_BYTES, store)
        self._held = [driver.allocate(size) for size in (self._b_bytes, FLUSHED_BYTES, FLUSHED_BYTES)]

    def enqueue(self, copy: int, *, way: str, launcher: Launcher | None) -> None:
        b, c = self.places.pairs[copy]
        if way == NETWORK:
            source, flushed, into = self._held
            self._flush(flushed, into)
            self._activation(source, b)
        if launcher is not None:
            launcher(self.driver.stream, b, c)

    def micros(self, way: str, launcher: Launcher | None) -> float:
        enqueue = partial(self.enqueue, way=way, launcher=launcher)
        return time_rotating(self.driver, enqueue, copies=len(self.places.pairs), effort=EFFORT).micros

    def free(self) -> None:
        self.places.free()
        for address in self._held:
            self.driver.free(address)


def timed(ways: Ways, kernels: Sequence[Compiled]) -> list[dict[str, list[float]]]:
    """Of each kernel the times by way, one for each turn."""
    launchers = [Launcher(one.cubin, one.entry, one.launch) for one in kernels]
    found: list[dict[str, list[float]]] = [{way: [] for way in WAYS} for _ in kernels]
    order = random.Random(0)
    for _ in range(TURNS):
        for way in WAYS:
            before = ways.micros(way, None) if way == NETWORK else 0.0
            for at in order.sample(range(len(kernels)), len(kernels)):
                found[at][way].append(round(ways.micros(way, launchers[at]) - before, 3))
    for launcher in launchers:
        launcher.unload()
    return found


def records() -> Iterator[Row]:
    device = detect_device()
    workers = max(1, len(os.sched_getaffinity(0)) - 2)
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        every = [*pool.map(work_of, *zip(*PROBLEMS, strict=True))]
        compiled = pool.map(partial(built, folder=folder), [one for listed in every for one in listed], chunksize=4)
        driver, store = open_driver(), Store(Path(folder))
        for listed in every:
            kernels = list(islice(compiled, len(listed)))
            ran: list[tuple[Work, Compiled]] = []
            for one, kernel in zip(listed, kernels, strict=True):
                if isinstance(kernel, str):
                    print(f"{one.gemm}, {one.sparsity}, {one.candidate.tile}: {kernel}", flush=True)
                else:
                    ran.append((one, kernel))
            (m, k, n), sparsity, _ = listed[0]
            ways = Ways(driver, (m, k, n), store)
            for (one, kernel), micros in zip(ran, timed(ways, [kernel for _, kernel in ran]), strict=True):
                tile, schedule = one.candidate.tile._asdict(), asdict(one.candidate.schedule)
                yield {"device": device.name, "m": m, "k": k, "n": n, "sparsity": sparsity, **tile, **schedule,
                       "cubin_bytes": len(kernel.cubin), "micros": micros}  # fmt: skip
            ways.free()
        driver.close()


def main() -> None:
    record("cold_choices.jsonl.gz", records(), description=__doc__)


if __name__ == "__main__":
    main()
