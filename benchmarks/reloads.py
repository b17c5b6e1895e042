"""Why one kernel, loaded again, takes another time: what its code's address, B's and C's, and the process have to do
with it.

    python -m benchmarks.reloads [--out DIR] [--layouts LOADS]

needs an H200 or H100. Some kernels are timed in rounds, so that drift shows as such: in many modules, all kept, so that
the same code lies at many addresses; the fastest and the slowest of them with B and C at many addresses, and a few
tiles at a time; behind a kernel of some blocks that does nothing; with the code laid out otherwise (``LAYOUTS``); and
all of it in several processes. ``--layouts`` times no more than each layout of the longest code, loaded so often, and
writes ``layouts.jsonl``. A tile that no timed launch runs says where the code lies. Writes ``reloads.jsonl`` and
prints, for each, how far its times are apart, and how far those of one and the same are.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.reloads_table import table
from lospmm.build import for_emitter
from lospmm.codegen.emission import Emission
from lospmm.codegen.sass.emit import without_fetch
from lospmm.codegen.sass.form import Opcode, blank
from lospmm.codegen.sass.machine import MachineCode
from lospmm.gpu.clocks import read_clocks
from lospmm.gpu.driver import Driver, Function, open_driver
from lospmm.gpu.timing import Effort, copies_beyond_l2, time_rotating
from lospmm.ir import KernelProgram, launch
from lospmm.lower import lower
from lospmm.model import Candidate, Launch, Problem, Schedule, TileSize
from lospmm.reorder import regroup
from lospmm.runtime.detect import detect_device
from lospmm.store import Store
from lospmm.toolchain import elf
from lospmm.toolchain.compile import compile_kernel
from lospmm_datasets.synthetic import uniform

#: (m, k, n, sparsity), the tile size and the schedule.
CASES = (
    ((768, 768, 4096, 0.9), TileSize(45, 608), Schedule(24, None, 2)),
    ((768, 768, 4096, 0.7), TileSize(31, 896), Schedule(16, None, 2, 128)),
    ((3072, 768, 4096, 0.9), TileSize(94, 512), Schedule(16, None, 0)),
)

PROCESSES, ROUNDS, MODULES, PLACES, LOADS = 3, 3, 10, 4, 6

#: Tiles that are run at a time, without the others.
WINDOW = 8

#: Blocks of the kernel that does nothing.
BEFORE = (0, 1, 2, 16, 132)
EFFORT = Effort(replays=7, warm_micros=2_000.0)

LINE = 8  # instructions
INSTRUCTION_BYTES = 16


Form = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Layout:
    """Every tile begins at a multiple of ``align`` bytes; ``front`` bytes come before the first and ``behind`` follow
    the last; ``turned`` lays the tiles from the last to the first."""

    align: int = 128
    front: int = 0
    behind: int = 0
    turned: bool = False


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "as it is": Layout(),
        "tiles at 4 KiB": Layout(4 << 10),
        "tiles at 128 KiB": Layout(128 << 10),
        "2 MiB behind": Layout(behind=2 << 20),
        "last tile first": Layout(turned=True),
    }
)


def nothing(count: int) -> Form:
    form = blank(count)
    form["op"], form["stall"], form["yields"] = Opcode.NOP, 0, 1
    return form


def laid_out(code: MachineCode, layout: Layout) -> MachineCode:
    """The same tiles elsewhere."""
    ends = np.append(code.starts[1:], len(code.form))
    step, at = layout.align // INSTRUCTION_BYTES, layout.front // INSTRUCTION_BYTES
    parts, starts = [nothing(at)], np.zeros(len(code.starts), np.int64)
    order = range(len(starts))
    for tile in reversed(order) if layout.turned else order:
        form = code.form[code.starts[tile] : ends[tile]]
        starts[tile] = at
        parts += [form, nothing(-len(form) % step)]
        at += len(form) + -len(form) % step
    parts.append(nothing(layout.behind // INSTRUCTION_BYTES))
    return replace(code, form=np.concatenate(parts), starts=starts)


def with_address(code: MachineCode, n: int) -> MachineCode:
    """One more tile, which stores its own address, two rows before C."""
    form = blank(LINE)
    form["op"] = (Opcode.LEPC, Opcode.NOP, Opcode.NOP, Opcode.STG, Opcode.STG, Opcode.EXIT, *[Opcode.NOP] * 2)
    form["stall"], form["rd"][0] = (11, 11, 11, 1, 1, 5, 1, 1), 8
    form["ra"][3:5], form["rb"][3:5], form["bytes"][3:5], form["ur"][3:5] = (
        code.entry.c,
        (8, 9),
        4,
        code.entry.descriptor,
    )
    form["offset"][3:5] = -8 * n, -4 * n
    return replace(
        code,
        form=np.concatenate((code.form, form)),
        starts=np.append(code.starts, len(code.form)),
        dispatch=(*code.dispatch, len(code.starts)),
        registers=max(code.registers, 12),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    cubin: bytes
    program: KernelProgram
    table_bytes: int  # from the start of the code to the tile that says where it is

    @property
    def launch(self) -> Launch:
        return launch(self.program)


def from_a_tile(prologue: str) -> str:
    """A third argument: the tile of the first block row."""
    tile = "mov.u32 %tile, %ctaid.y;"
    assert tile in prologue
    further = f"{tile}\n.reg .b32 %first; ld.param.u32 %first, [first]; add.u32 %tile, %tile, %first;"
    return prologue.replace(tile, further).replace(".param .u64 c)", ".param .u64 c, .param .u32 first)")


NOTHING = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry nothing () { exit; }
"""


def build(problem: Problem, tile: TileSize, schedule: Schedule, layout: Layout, store: Store) -> Kernel:
    program = lower(problem, Candidate(tile, schedule, regroup(problem.matrix, [tile.rows])[tile.rows]))
    emission = without_fetch(program, problem.device.arch)
    assert emission.machine is not None
    machine = with_address(laid_out(emission.machine, layout), problem.n)
    emission = replace(emission, machine=machine, units=tuple(map(from_a_tile, emission.units)))
    arch, registers = problem.device.arch, program.registers
    binary = compile_kernel(emission, arch=arch, registers=registers, store=store, workers=1)
    parts = {section.name: section.content for section in elf.sections(binary.cubin)}
    last = int(np.frombuffer(parts[f".nv.constant2.{program.name}"], "<u4")[-1])
    return Kernel(binary.cubin, program, last)


class Bench:
    """B and C of a problem in as many copies as it takes, wherever they were put last."""

    def __init__(self, driver: Driver, problem: Problem) -> None:
        self.driver, self.problem = driver, problem
        self.sizes = 4 * problem.matrix.k * problem.n, 4 * problem.matrix.m * problem.n
        self.before = 8 * problem.n  # bytes before C, for an address
        self.copies = copies_beyond_l2(sum(self.sizes), driver.l2_bytes())
        values = np.random.default_rng(0).uniform(-1, 1, size=self.sizes[0] // 4).astype(np.float32)
        self.values = values
        self.places = self.allocate()

    def allocate(self) -> list[tuple[int, int]]:
        places = []
        for _ in range(self.copies):
            b, c = self.driver.allocate(self.sizes[0]), self.driver.allocate(self.sizes[1] + self.before)
            self.driver.upload(b, self.values)
            places.append((b, c + self.before))
        return places

    def free(self, places: Sequence[tuple[int, int]]) -> None:
        for b, c in places:
            self.driver.free(b)
            self.driver.free(c - self.before)

    def code_address(self, kernel: Kernel, function: Function) -> int:
        b, c = self.places[0]
        rows = kernel.launch.grid[1] + 1
        shape = Launch((1, rows, 1), kernel.launch.block)
        self.driver.launch(function, shape, [np.uint64(b), np.uint64(c), np.uint32(0)])
        words = [np.zeros(1, np.uint32) for _ in range(2)]
        for number, word in enumerate(words):
            self.driver.download(word, c - self.before + 4 * self.problem.n * number)
        return (int(words[0][0]) | int(words[1][0]) << 32) - kernel.table_bytes

    def micros(
        self,
        kernel: Kernel,
        function: Function,
        places: Sequence[tuple[int, int]],
        copies: int = 0,
        tiles: range | None = None,
        before: Callable[[], None] | None = None,
    ) -> float:
        """Of one launch: of all tiles, or of some, and of what is launched ``before`` it."""
        shape = kernel.launch
        if tiles is not None:
            shape = replace(shape, grid=(shape.grid[0], len(tiles), shape.grid[2]))
        first = np.uint32(0 if tiles is None else tiles.start)

        def run(copy: int) -> None:
            if before is not None:
                before()
            self.driver.launch(function, shape, [*(np.uint64(place) for place in places[copy]), first])

        return time_rotating(self.driver, run, copies=copies or self.copies, effort=EFFORT).micros


def _modules(bench: Bench, kernel: Kernel) -> Iterator[dict[str, Any]]:
    """Many modules; then the fastest and the slowest with other B and C, and by tiles."""
    loaded = [bench.driver.load(kernel.cubin, kernel.program.name) for _ in range(MODULES)]
    addresses = [bench.code_address(kernel, function) for function in loaded]
    times: list[list[float]] = [[] for _ in loaded]
    for turn in range(ROUNDS):
        for number, function in enumerate(loaded):
            times[number].append(bench.micros(kernel, function, bench.places))
            warm = bench.micros(kernel, function, bench.places, 1)
            yield {"varied": "module", "number": number, "round": turn, "code": addresses[number],
                   "b": bench.places[0][0], "micros": times[number][-1], "warm": warm}  # fmt: skip
    order = sorted(range(MODULES), key=lambda number: statistics.median(times[number]))
    for kind, number in (("fastest", order[0]), ("slowest", order[-1])):
        about = {"module": kind, "code": addresses[number]}
        for row in _places(bench, kernel, loaded[number]):
            yield {**about, **row}
        tiles = range(len(kernel.program.dispatch))
        for start in tiles[:: WINDOW // 2]:
            window = tiles[start : start + WINDOW]
            micros = bench.micros(kernel, loaded[number], bench.places, 1, window)
            yield {**about, "varied": "tiles", "number": start, "round": 0, "tiles": len(window), "micros": micros}


def _places(bench: Bench, kernel: Kernel, function: Function) -> Iterator[dict[str, Any]]:
    every, spacers = [bench.places], []
    for number in range(1, PLACES):
        spacers.append(bench.driver.allocate((2 * number + 1) << 20))
        every.append(bench.allocate())
    for turn in range(ROUNDS):
        for number, places in enumerate(every):
            micros = bench.micros(kernel, function, places)
            yield {"varied": "B and C", "number": number, "round": turn, "b": places[0][0], "micros": micros}
    for places in every[1:]:
        bench.free(places)
    for spacer in spacers:
        bench.driver.free(spacer)


def _behind(bench: Bench, kernel: Kernel, store: Store) -> Iterator[dict[str, Any]]:
    """Behind a kernel that does nothing, less what that one takes."""
    emission = Emission("ptx", "nothing", NOTHING, (NOTHING,))
    image = compile_kernel(emission, arch="sm_90", registers=32, store=store, workers=1).cubin
    driver, nothing = bench.driver, bench.driver.load(image, "nothing")
    function = driver.load(kernel.cubin, kernel.program.name)
    for turn in range(ROUNDS):
        for blocks in BEFORE:
            shape = Launch((max(blocks, 1), 1, 1), 32)

            def before(shape: Launch = shape) -> None:
                driver.launch(nothing, shape, [])

            alone = 0.0
            if blocks:
                alone = time_rotating(driver, lambda _, before=before: before(), copies=1, effort=EFFORT).micros  # type: ignore[misc]
            micros = bench.micros(kernel, function, bench.places, before=before if blocks else None)
            yield {"varied": "kernel before", "number": blocks, "round": turn, "b": bench.places[0][0],
                   "alone": alone, "micros": micros - alone}  # fmt: skip


def _layouts(bench: Bench, kernels: Mapping[str, Kernel], loads: int = LOADS) -> Iterator[dict[str, Any]]:
    loaded = [
        (name, kernel, function, bench.code_address(kernel, function))
        for _ in range(loads)
        for name, kernel in kernels.items()
        for function in (bench.driver.load(kernel.cubin, kernel.program.name),)
    ]
    for turn in range(ROUNDS - 1):
        for number, (name, kernel, function, code) in enumerate(loaded):
            micros = bench.micros(kernel, function, bench.places)
            yield {"varied": "layout", "layout": name, "number": number // len(kernels), "round": turn, "code": code,
                   "b": bench.places[0][0], "micros": micros}  # fmt: skip


def child(process: int, loads: int) -> Iterator[dict[str, Any]]:
    """What one process measures: only the first does the layouts, or all of them only those, with more ``loads``."""
    driver, device = open_driver(), detect_device()
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        for number, ((m, k, n, sparsity), tile, schedule) in enumerate(CASES):
            if loads and number < len(CASES) - 1:
                continue  # the code of the last is the longest
            problem = for_emitter(Problem(uniform(m, k, sparsity, seed=0), n, device), "sass")
            names = LAYOUTS if process == 0 or loads else ("as it is",)
            kernels = {name: build(problem, tile, schedule, LAYOUTS[name], store) for name in names}
            bench, kernel = Bench(driver, problem), kernels["as it is"]
            about = {"device": device.name, "process": process, "kernel": number, "code_bytes": kernel.table_bytes,
                     "m": m, "k": k, "n": n, "sparsity": sparsity, **tile._asdict(), **asdict(schedule)}  # fmt: skip
            works: list[Callable[[], Iterator[dict[str, Any]]]] = [
                lambda bench=bench, kernel=kernel: _modules(bench, kernel),  # type: ignore[misc]
                lambda bench=bench, kernel=kernel: _behind(bench, kernel, store),  # type: ignore[misc]
            ]
            if loads:
                works = [lambda bench=bench, kernels=kernels: _layouts(bench, kernels, loads)]  # type: ignore[misc]
            elif process == 0:
                works.append(lambda bench=bench, kernels=kernels: _layouts(bench, kernels))  # type: ignore[misc]
            for work in works:
                for row in work():
                    clocks = read_clocks(driver.bus_id())
                    yield {**about, **row, "sm_mhz": None if clocks is None else clocks.sm_mhz}
            bench.free(bench.places)
    driver.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--layouts", type=int, default=0, metavar="LOADS")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        for row in child(options.child, options.layouts):
            print(json.dumps(row), flush=True)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with (options.out / ("layouts.jsonl" if options.layouts else "reloads.jsonl")).open("w") as file:
        for process in range(PROCESSES):
            arguments = ("--child", str(process), "--layouts", str(options.layouts))
            command = (sys.executable, "-m", "benchmarks.reloads", *arguments)
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
                assert running.stdout is not None
                for line in running.stdout:
                    rows.append(json.loads(line))
                    file.write(line)
                    file.flush()
    print(table(rows))


if __name__ == "__main__":
    main()
