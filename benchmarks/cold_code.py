"""What kernels take whose code is no longer in the L2 cache, and what it is worth to fetch it (docs/decisions/0028).

    python -m benchmarks.cold_code [--out DIR]

needs an H200 or H100. The kernels that tuning chose for the seven problems, and one of each of the 41 shapes at 98 %
zeros, whatever its size, are timed as they are and with tiles that fetch their code
(``lospmm.codegen.sass.fetch``): one launch after another; behind an activation that reads and writes as much as a
layer's does, or more than the L2 cache has; and as in a network, behind the latter and an activation that writes B. Of
these three the time of what comes before is taken off. Writes ``cold_code.jsonl`` and prints a line for each kernel and
form.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from benchmarks.early import cases
from benchmarks.overlapping import activation, compiled
from benchmarks.placing import CASES, Case, Places, candidate_of
from benchmarks.recorded import Row, record
from lospmm.codegen.sass.emit import emission_of, tiles_of
from lospmm.codegen.sass.fetch import sharers_of, span_bytes
from lospmm.codegen.sass.listing import BYTES_PER_INSTRUCTION
from lospmm.gpu.driver import Driver, open_driver
from lospmm.gpu.launcher import Launcher
from lospmm.gpu.timing import Effort, time_rotating
from lospmm.lower import lower
from lospmm.model import Compiled
from lospmm.runtime.detect import detect_device
from lospmm.store import Store

TURNS = 3
EFFORT = Effort(replays=9, warm_micros=1_500.0, launches=8)

#: What is run before each launch, by its name: the bytes that it reads, and writes; and whether B is written last.
BEFORE = {
    "": (0, False),
    "13 MB read and written": (13 << 20, False),
    "96 MB read and written": (96 << 20, False),
    "96 MB, and B written": (96 << 20, True),
}

#: Copies of the smaller, so that each is somewhere else.
SMALL_COPIES = 8

FORMS = ("as it is", "fetched")


def chosen() -> list[Case]:
    shapes = (Case("shapes", gemm, sparsity, *tiles[0]) for gemm, sparsity, tiles in cases((0.98,)))
    return [*CASES[:7], *shapes]


def built(case: Case, folder: str) -> dict[str, Compiled]:
    """Both forms of the kernel of a case."""
    problem, candidate = candidate_of(case)
    program, arch = lower(problem, candidate), problem.device.arch
    code, store = tiles_of(program, arch), Store(Path(folder))
    assert program.cols is not None
    size = BYTES_PER_INSTRUCTION * len(code.form)
    fetches = sharers_of(program, size, arch) or int(span_bytes(program.cols, 1) <= size)  # also what is too small
    return {
        form: compiled(program, emission_of(program, code, count), arch, store)
        for form, count in zip(FORMS, (0, fetches), strict=True)
    }


def in_turns(driver: Driver, size: int, store: Store) -> Callable[[int], None]:
    """An activation of so many bytes, between other places for each copy of B and C."""
    one, copies = activation(driver, size, store), SMALL_COPIES if size < 32 << 20 else 1
    places = [(driver.allocate(size), driver.allocate(size)) for _ in range(copies)]
    return lambda copy: one(*places[copy % copies])


def timed(
    driver: Driver,
    case: Case,
    kernels: dict[str, Compiled],
    activations: dict[int, Callable[[int], None]],
    store: Store,
) -> Iterator[Row]:
    _, k, n = case.gemm
    places, source = Places(driver, case), driver.allocate(4 * k * n)
    writes = activation(driver, 4 * k * n, store)
    driver.copy(source, places.pairs[0][0], 4 * k * n)
    launchers = {form: Launcher(kernel.cubin, kernel.entry, kernel.launch) for form, kernel in kernels.items()}

    def enqueue(copy: int, *, before: str, form: str) -> None:
        (size, writes_b), (b, c) = BEFORE[before], places.pairs[copy]
        if size:
            activations[size](copy)
        if writes_b:
            writes(source, b)
        if form:
            launchers[form](driver.stream, b, c)

    for turn in range(TURNS):
        for before in BEFORE:
            alone = 0.0
            for form in ("", *FORMS) if before else FORMS:
                one = partial(enqueue, before=before, form=form)
                micros = time_rotating(driver, one, copies=len(places.pairs), effort=EFFORT).micros
                if form:
                    yield {"before": before, "form": form, "turn": turn, "micros": round(micros - alone, 3),
                           "code_bytes": len(kernels[form].cubin)}  # fmt: skip
                else:
                    alone = micros
    for launcher in launchers.values():
        launcher.unload()
    places.free()
    driver.free(source)


def records() -> Iterator[Row]:
    device, wanted = detect_device(), chosen()
    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), get_context("spawn")) as pool:
            kernels = list(pool.map(partial(built, folder=folder), wanted))
        driver, store = open_driver(), Store(Path(folder))
        activations = {size: in_turns(driver, size, store) for size, _ in BEFORE.values() if size}
        for case, forms in zip(wanted, kernels, strict=True):
            m, k, n = case.gemm
            for row in timed(driver, case, forms, activations, store):
                yield {"device": device.name, "set": case.set, "m": m, "k": k, "n": n, "sparsity": case.sparsity,
                       **case.tile._asdict(), **row}  # fmt: skip
        driver.close()


def main() -> None:
    record("cold_code", records(), description=__doc__)


if __name__ == "__main__":
    main()
