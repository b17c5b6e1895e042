"""Two facts of a GPU with clusters of blocks: how many run at a time, and when a wait takes effect.

    python -m fitting.clusters [--out DIR]

needs an H200 or H100. The first: clusters whose blocks each fill an SM run for a while; those that started before the
first one ended ran at the same time. The second: one of two blocks arrives at the cluster's barrier and waits some
cycles later; the other writes a number much later, and then arrives. If the wait took effect, the first block reads the
number. Writes ``clusters.jsonl`` and prints both.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Row, record
from fitting import DATA
from lospmm.codegen.emission import Emission
from lospmm.codegen.ir import KernelProgram, TileProgram
from lospmm.codegen.sass import scheduler
from lospmm.codegen.sass.form import Opcode, blank
from lospmm.codegen.sass.machine import CLUSTER_ENTRY, MachineCode, padding
from lospmm.codegen.sass.prologue import prologue
from lospmm.codegen.schedule import zero_program
from lospmm.gpu.detect import detect_device
from lospmm.gpu.driver import open_driver
from lospmm.gpu.protocol import Driver
from lospmm.problem.launch import Launch
from lospmm.problem.problem import SPLITS
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel

THREADS = 1024
SHARED_BYTES = 120 << 10  # two blocks do not fit an SM
STAY_NANOSECONDS = 200_000
CLUSTERS = 200  # more than run at a time

REPEATS = 20
WAIT_CYCLES = range(1, 12)
COLUMNS = 32
LATE_ROUNDS = 2000  # of some 30 cycles

Form = NDArray[np.void]


def stay(size: int) -> str:
    """Return PTX of a kernel whose blocks record their start, stay for a while, and record their end."""
    return f"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry stay (.param .u64 out) .maxntid {THREADS} .reqnctapercluster {size}, 1, 1
{{
.reg .b64 %out, %at, %start, %now, %since; .reg .b32 %thread, %block; .reg .pred %p, %first;
mov.u64 %start, %globaltimer; mov.u32 %thread, %tid.x; mov.u32 %block, %ctaid.x;
AGAIN: mov.u64 %now, %globaltimer; sub.u64 %since, %now, %start;
setp.lt.u64 %p, %since, {STAY_NANOSECONDS}; @%p bra AGAIN;
ld.param.u64 %out, [out]; mad.wide.u32 %at, %block, 16, %out; setp.eq.u32 %first, %thread, 0;
@%first st.global.u64 [%at], %start; @%first st.global.u64 [%at+8], %now;
exit;
}}
"""


def at_a_time(driver: Driver, size: int, store: Store) -> int:
    """Return how many clusters of ``size`` blocks run together."""
    text = stay(size)
    emission = Emission("ptx", "stay", text, (text,))
    image = compile_kernel(emission, arch="sm_90", registers=32, store=store, workers=1).cubin
    out = driver.allocate(16 * size * CLUSTERS)
    function, shape = driver.load(image, "stay"), Launch((size * CLUSTERS, 1, 1), THREADS, SHARED_BYTES)
    times = np.zeros((CLUSTERS, size, 2), np.uint64)
    for _ in range(2):  # the first loads the code
        driver.launch(function, shape, [np.uint64(out)])
        driver.download(times, out)
    driver.free(out)
    return int((times[:, :, 0].min(axis=1) < times[:, :, 1].min()).sum())


def _one(op: Opcode, stall: int = 6, **fields: int) -> Form:
    form = blank(1)
    form["op"], form["stall"] = op, stall
    for name, value in fields.items():
        form[name] = value
    return form


def early(cycles: int) -> Form:
    """Return code that arrives, waits that many cycles later, and copies row 0 of B to row 1 of C."""
    entry = CLUSTER_ENTRY
    memory = {"ur": entry.descriptor, "bytes": 4}
    load = _one(Opcode.LDG, 2, rd=12, ra=entry.b, write_barrier=0, **memory)
    store = _one(Opcode.STG, ra=entry.c, rb=12, offset=4 * COLUMNS, wait=1, **memory)
    arrive = _one(Opcode.CLUSTER_ARRIVE, cycles)
    wait = _one(Opcode.CLUSTER_WAIT, 11)
    return np.concatenate((wait, arrive, wait, load, store, scheduler._leave()))


def late() -> Form:
    """Return code that writes a number to row 0 of C after a long time, and then arrives."""
    entry = CLUSTER_ENTRY
    memory = {"ur": entry.descriptor, "bytes": 4}
    again = _one(Opcode.BRA, 5, predicate=1, offset=-4 * 16)
    count = _one(Opcode.IADD3, 11, rd=13, ra=13, immediate=0xFFFFFFFF, carry=1)
    nothing = _one(Opcode.NOP, 11)
    return np.concatenate(
        (
            _one(Opcode.CLUSTER_WAIT, 11),
            _one(Opcode.MOV_IMM, rd=12, immediate=0x3F800000),
            _one(Opcode.MOV_IMM, rd=13, immediate=LATE_ROUNDS),
            count,
            nothing,
            nothing,
            again,
            _one(Opcode.STG, ra=entry.c, rb=12, **memory),
            _one(Opcode.MEMBAR),
            scheduler._cluster((Opcode.ERRBAR, Opcode.CGAERRBAR, Opcode.CLUSTER_ARRIVE, Opcode.CLUSTER_WAIT)),
            scheduler._leave(),
        )
    )


def waiting_kernel(cycles: int, store: Store) -> bytes:
    """Return the cubin of a kernel with an ``early`` and a ``late`` block."""
    nothing: tuple[TileProgram, ...] = (zero_program(np.zeros(0, np.int32)),) * 2
    program = KernelProgram("wait", 2, 1, COLUMNS, COLUMNS, nothing, (0, 1), 32, split_k=2)
    forms = [np.concatenate((form, padding(len(form)))) for form in (early(cycles), late())]
    starts = np.array([0, len(forms[0])])
    machine = MachineCode(np.concatenate(forms), starts, (0, 1), 24, CLUSTER_ENTRY, split_k=2)
    emission = Emission("sass", "wait", "", (prologue(program, "sm_90"),), machine)
    return compile_kernel(emission, arch="sm_90", registers=32, store=store, workers=1).cubin


def waited(driver: Driver, cycles: int, store: Store) -> int:
    """Return in how many of REPEATS runs a wait ``cycles`` after the arrival waited for the other block."""
    function = driver.load(waiting_kernel(cycles, store), "wait")
    memory = driver.allocate(8 * COLUMNS)
    found = np.zeros((2, COLUMNS), np.float32)
    runs = 0
    for _ in range(REPEATS):
        driver.fill(memory, 0, 2 * COLUMNS)
        driver.launch(function, Launch((1, 2, 1), COLUMNS), [np.uint64(memory), np.uint64(memory)])
        driver.download(found, memory)
        assert (found[0] == 1).all(), "the late block has not written"
        runs += int((found[1] == 1).all())
    driver.free(memory)
    return runs


def records() -> Iterator[dict[str, Any]]:
    """Yield the results as lines of the file."""
    driver, device = open_driver(), detect_device()
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        for size in SPLITS:
            yield {"device": device.name, "cluster": size, "at_a_time": at_a_time(driver, size, store)}
        for cycles in WAIT_CYCLES:
            yield {"device": device.name, "cycles": cycles, "waited": waited(driver, cycles, store), "runs": REPEATS}
    driver.close()


def main() -> None:
    """Run the command line."""
    record("clusters.jsonl", records(), _shown, description=__doc__, folder=DATA)


def _shown(row: Row) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.items() if name != "device")


if __name__ == "__main__":
    main()
