"""What kernels take whose code is no longer in the L2 cache, and what it is worth to fetch it (docs/decisions/0028).

    python -m benchmarks.cold_code [--out DIR]

needs an H200 or H100. The kernels that tuning chose for the seven problems, and one of each of the 41 shapes at 98 %
zeros, whatever its size, are timed as they are and with a prologue whose blocks fetch the code
(``lospmm.codegen.sass.fetch``): one launch after another, and behind an activation that reads and writes as much as a
layer's does, or more than the L2 cache has. Of the latter two the time of the activation alone is taken off. Writes
``cold_code.jsonl`` and prints a line for each kernel and form.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from benchmarks.early import cases
from benchmarks.overlapping import activation, compiled
from benchmarks.placing import CASES, Case, Places, candidate_of
from benchmarks.recorded import Row, record
from lospmm.codegen import emit
from lospmm.codegen.sass.fetch import MIN_CODE_BYTES, fetchers
from lospmm.codegen.sass.prologue import prologue
from lospmm.gpu.driver import Driver, open_driver
from lospmm.gpu.launcher import Launcher
from lospmm.gpu.timing import Effort, time_rotating
from lospmm.lower import lower
from lospmm.model import Compiled
from lospmm.runtime.detect import detect_device
from lospmm.store import Store

TURNS = 3
EFFORT = Effort(replays=9, warm_micros=1_500.0, launches=8)

#: What is run before each launch, by its name: the bytes that it reads, and writes.
BEFORE = {"": 0, "13 MB read and written": 13 << 20, "96 MB read and written": 96 << 20}

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
    emission, store = emit(program, "sass", arch), Store(Path(folder))
    assert emission.machine is not None
    found = {}
    for form, blocks in zip(FORMS, (0, fetchers(program, MIN_CODE_BYTES, arch)), strict=True):
        units, machine = (prologue(program, arch, fetches=blocks > 0),), replace(emission.machine, fetchers=blocks)
        found[form] = compiled(program, replace(emission, units=units, machine=machine), arch, store)
    return found


def in_turns(driver: Driver, size: int, store: Store) -> Callable[[int], None]:
    """An activation of so many bytes, between other places for each copy of B and C."""
    one, copies = activation(driver, size, store), SMALL_COPIES if size < 32 << 20 else 1
    places = [(driver.allocate(size), driver.allocate(size)) for _ in range(copies)]
    return lambda copy: one(*places[copy % copies])


def timed(
    driver: Driver, case: Case, kernels: dict[str, Compiled], befores: dict[str, Callable[[int], None]]
) -> Iterator[Row]:
    places = Places(driver, case)
    launchers = {form: Launcher(kernel.cubin, kernel.entry, kernel.launch) for form, kernel in kernels.items()}

    def enqueue(copy: int, *, before: str, form: str) -> None:
        if before:
            befores[before](copy)
        if form:
            launchers[form](driver.stream, *places.pairs[copy])

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


def records() -> Iterator[Row]:
    device, wanted = detect_device(), chosen()
    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), get_context("spawn")) as pool:
            kernels = list(pool.map(partial(built, folder=folder), wanted))
        driver, store = open_driver(), Store(Path(folder))
        befores = {name: in_turns(driver, size, store) for name, size in BEFORE.items() if size}
        for case, forms in zip(wanted, kernels, strict=True):
            m, k, n = case.gemm
            for row in timed(driver, case, forms, befores):
                yield {"device": device.name, "set": case.set, "m": m, "k": k, "n": n, "sparsity": case.sparsity,
                       **case.tile._asdict(), **row}  # fmt: skip
        driver.close()


def main() -> None:
    record("cold_code", records(), description=__doc__)


if __name__ == "__main__":
    main()
