"""What kernels gain that the GPU starts before the one before them has ended (docs/decisions/0026).

    python -m benchmarks.overlapping [--out DIR]

needs an H200 or H100, and a driver of CUDA 12.3. A kernel that waits by itself for what was launched before it
(``griddepcontrol.wait``, behind its prologue) may be launched "programmatically": its blocks are given to SMs when all
blocks of the one before have ended, and with ``griddepcontrol.launch_dependents`` at their beginning as soon as one has
and leaves room. Some of the 41 shapes at 98 % zeros and three of the seven problems are timed one after another in a
CUDA graph, on other copies of B and C each; then some of those with an ordinary kernel, which reads and writes as much
as a layer's activation does, before each one, two or four of them, each with code of its own. What is launched in
either way must give the same C. Writes ``overlapping.jsonl`` and prints a line for each timing.
"""

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.before import loaded
from benchmarks.early import cases
from benchmarks.jumps import SHAPES
from benchmarks.placing import CASES, Case, Places, candidate_of
from benchmarks.recorded import Row, record
from lospmm.codegen import emit
from lospmm.codegen.emission import Emission
from lospmm.gpu.driver import Driver, open_driver
from lospmm.gpu.launcher import Launcher
from lospmm.gpu.timing import Effort, time_rotating
from lospmm.ir import KernelProgram, launch
from lospmm.lower import lower
from lospmm.model import Compiled, Launch
from lospmm.runtime.detect import detect_device
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel

TURNS = 5
EFFORT = Effort(replays=9, warm_micros=1_500.0, launches=16)

#: Of the seven problems: 768 x 768 at 90 and 98 % zeros, and 3072 x 768.
SEVEN = CASES[1:4]

#: Those that are mixed with ordinary kernels, and how many follow one another.
MIXED = ((768, 768, 4096), (1024, 256, 3136), (232, 232, 784))
RUNS = (1, 2, 4)

#: What stands at the beginning of the prologue, and what before its jump, by the name of a form. The first is launched
#: in the ordinary way, the others programmatically.
FIRST, JUMP = "mov.u32 %tile, %ctaid.y;", "brx.idx %tile"
FORMS: Mapping[str, tuple[str, str]] = {
    "one after another": ("", ""),
    "waits": ("", "griddepcontrol.wait;\n"),
    "waits, lets the next one start": ("griddepcontrol.launch_dependents;\n", "griddepcontrol.wait;\n"),
}
ORDINARY, WAITING, _ = FORMS

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


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of the driver API: programmatic stream serialization is allowed."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_byte * 60),
    )


_PROGRAMMATIC = _Attribute(6, 0, 1)


def programmatic(launcher: Launcher) -> Launcher:
    """``launcher``, so that it launches programmatically from now on."""
    for frame in launcher._frames:
        frame.config.attributes, frame.config.attribute_count = ctypes.addressof(_PROGRAMMATIC), 1
    return launcher


def chosen() -> list[Case]:
    """Of each shape the tile that an earlier search chose."""
    found = {gemm: tiles[0] for gemm, _, tiles in cases((0.98,)) if gemm in SHAPES}
    return [*SEVEN, *(Case("shapes", gemm, 0.98, *tile) for gemm, tile in found.items() if gemm != SEVEN[1].gemm)]


def built(case: Case, folder: str) -> dict[str, Compiled]:
    """The kernel of a case in all forms."""
    problem, candidate = candidate_of(case)
    program, arch = lower(problem, candidate), problem.device.arch
    emission, store = emit(program, "sass", arch), Store(Path(folder))
    forms = {}
    for name, (first, before_jump) in FORMS.items():
        (unit,) = emission.units
        text = unit.replace(FIRST, first + FIRST).replace(JUMP, before_jump + JUMP)
        forms[name] = compiled(program, replace(emission, units=(text,)), arch, store)
    return forms


def compiled(program: KernelProgram, emission: Emission, arch: str, store: Store) -> Compiled:
    binary = compile_kernel(emission, arch=arch, registers=program.registers, store=store, workers=1)
    return Compiled(binary.cubin, program.name, launch(program))


def launcher_of(kernel: Compiled, form: str) -> Launcher:
    launcher = Launcher(kernel.cubin, kernel.entry, kernel.launch)
    return launcher if form == ORDINARY else programmatic(launcher)


def same(driver: Driver, case: Case, places: Places, launchers: Mapping[str, Launcher]) -> dict[str, bool]:
    """Whether each form, launched three times in a row, leaves the C of the first, bit for bit."""
    (m, _, n), (b, c) = case.gemm, places.pairs[0]
    found = {}
    for form, launcher in launchers.items():
        driver.fill(c, 0xFFFFFFFF, m * n)
        for _ in range(3):
            launcher(driver.stream, b, c)
        found[form] = np.empty((m, n), np.uint32)
        driver.download(found[form], c)
    return {form: bool((c == found[ORDINARY]).all()) for form, c in found.items()}


def alone(driver: Driver, case: Case, places: Places, kernels: Mapping[str, Compiled]) -> Iterator[Row]:
    launchers = {form: launcher_of(kernel, form) for form, kernel in kernels.items()}
    are_same = same(driver, case, places, launchers)
    for turn in range(TURNS):
        for form, launcher in launchers.items():
            micros = _micros(driver, places, lambda copy, run=launcher: run(driver.stream, *places.pairs[copy]))
            yield {"before": "", "run": 1, "form": form, "turn": turn, "micros": micros, "same": are_same[form]}
    for launcher in launchers.values():
        launcher.unload()


def activation(driver: Driver, size: int, store: Store) -> Callable[[int, int], None]:
    """What puts one on the stream that reads ``size`` bytes from one address and writes as many to another."""
    function, count = loaded(driver, ACTIVATION, "activation", store), size // 16
    shape = Launch((-(-count // ACTIVATION_THREADS), 1, 1), ACTIVATION_THREADS)
    return lambda start, end: driver.launch(function, shape, (np.uint64(start), np.uint64(end), np.uint32(count)))


def mixed(driver: Driver, case: Case, places: Places, kernels: Mapping[str, Compiled], store: Store) -> Iterator[Row]:
    """Times of an activation and ``run`` kernels behind it, together."""
    _, k, n = case.gemm
    before = activation(driver, 4 * k * n, store)
    sources = [driver.allocate(4 * k * n) for _ in places.pairs]
    runs = {form: [launcher_of(kernels[WAITING], form) for _ in range(max(RUNS))] for form in (ORDINARY, WAITING)}

    def enqueue(copy: int, *, form: str, count: int) -> None:
        before(sources[copy], places.pairs[copy][0])
        for number, launcher in enumerate(runs[form][:count]):
            launcher(driver.stream, *places.pairs[(copy + number) % len(places.pairs)])

    for turn in range(TURNS):
        for count in RUNS:
            for form in runs:
                micros = _micros(driver, places, partial(enqueue, form=form, count=count))
                yield {"before": "activation", "run": count, "form": form, "turn": turn, "micros": micros}
    for launchers in runs.values():
        for launcher in launchers:
            launcher.unload()
    for source in sources:
        driver.free(source)


def _micros(driver: Driver, places: Places, enqueue: Callable[[int], object]) -> float:
    def once(copy: int) -> None:
        enqueue(copy)

    return round(time_rotating(driver, once, copies=len(places.pairs), effort=EFFORT).micros, 3)


def records() -> Iterator[Row]:
    device, wanted = detect_device(), chosen()
    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), get_context("spawn")) as pool:
            kernels = list(pool.map(partial(built, folder=folder), wanted))
        driver = open_driver()
        for case, forms in zip(wanted, kernels, strict=True):
            (m, k, n), places = case.gemm, Places(driver, case)
            about = {"device": device.name, "m": m, "k": k, "n": n, "sparsity": case.sparsity, **case.tile._asdict()}
            for row in alone(driver, case, places, forms):
                yield {**about, **row}
            if case.gemm in MIXED:
                for row in mixed(driver, case, places, forms, Store(Path(folder))):
                    yield {**about, **row}
            places.free()
        driver.close()


def main() -> None:
    record("overlapping", records(), description=__doc__)


if __name__ == "__main__":
    main()
