"""Two columns to a thread: as two float32, and as pairs of 16-bit numbers in the registers of one.

    python -m benchmarks.pairs [--out DIR] [--problems COUNT]

needs an H200 or H100. For each of the seven problems kernels of float32, of two float32 a thread and of float16 are
timed over tile sizes of one and two blocks an SM (``tiles``), and the fastest of float16 again with its multiply-adds
in either pipe alone, and as bfloat16; cuBLAS multiplies the same sizes as a dense product, where torch is there. Errors
are against float64, for A and B as they were rounded. Writes ``pairs.jsonl`` and prints a line per problem and kind.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.checked import Kernel, Operands
from benchmarks.kernels_table import KNOWN
from lospmm.build import for_emitter
from lospmm.codegen import emit
from lospmm.codegen.emission import Emission
from lospmm.codegen.sass import scheduler
from lospmm.codegen.sass.form import RZ, Opcode
from lospmm.codegen.sass.half import packed
from lospmm.codegen.sass.machine import MachineCode
from lospmm.dtype import DTYPES
from lospmm.gpu.driver import open_driver
from lospmm.gpu.timing import Effort, copies_beyond_l2
from lospmm.ir import grid
from lospmm.lower import lower
from lospmm.matrix import SparseMatrix
from lospmm.model import Candidate, Launch, Problem, Schedule, TileSize, ceil_div
from lospmm.reorder import regroup
from lospmm.runtime.detect import detect_device
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm_datasets.synthetic import uniform

WIDTHS = (192, 256, 384, 512, 608, 704, 832, 1024)
PREFETCHES = (72, 48, 32, 24, 16)
EFFORT = Effort(replays=7, warm_micros=2_000.0)

#: Of a register file of 65,536 by threads, in steps of 8; and what a tile needs beside accumulators and buffers.
REGISTERS, BESIDE = 65_536, 14

Form = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Kind:
    """``words`` are the registers that hold an element of B; a thread has ``columns`` columns in them."""

    name: str
    number: str
    words: int
    columns: int
    pipes: tuple[int, ...] = (0, 1)

    @property
    def element_bytes(self) -> int:
        return 4 * self.words // self.columns


SINGLE = Kind("float32", "float32", 1, 1)
DOUBLE = Kind("float32, two columns", "float32", 2, 2)
HALF = Kind("float16", "float16", 1, 2)
OTHERS = (
    replace(HALF, name="float16, HFMA2 alone", pipes=(0,)),
    replace(HALF, name="float16, HFMA2.MMA alone", pipes=(1,)),
    replace(HALF, name="bfloat16", number="bfloat16"),
)


def tiles(m: int, n: int, kind: Kind, sms: int) -> list[tuple[TileSize, Schedule]]:
    """Tile sizes of one and of two blocks an SM, as few rows as that leaves, with the deepest prefetch that fits."""
    found = {}
    threads = n // kind.columns
    widths = WIDTHS if kind.words == 1 else WIDTHS[1:4]
    for width in (width for width in widths if width <= ceil_div(threads, 32) * 32):
        for waves in (1, 2):
            across = ceil_div(threads, width)
            rows = ceil_div(m, max(waves * sms // across, 1))
            room = (min(255, REGISTERS // width // 8 * 8) - BESIDE) // kind.words - rows
            deepest = next((depth for depth in PREFETCHES if depth <= room), None)
            if deepest is not None and rows >= min(8, m):
                found[TileSize(rows, width)] = Schedule(deepest, None, 2 if across > 1 else 1)
    return list(found.items())


def doubled(code: MachineCode) -> MachineCode:
    """Every thread with two columns next to each other: loads and stores of 8 bytes, two multiply-adds for each."""
    form = code.form
    fma, load, store = (form["op"] == op for op in (Opcode.FFMA_IMM, Opcode.LDG, Opcode.STG))
    data = np.unique(np.concatenate((form["rd"][fma | load], form["rb"][store])))
    data = data[data != RZ]
    taken = {*code.entry.taken, *np.unique(form["ra"][load | store]).tolist()}
    first = 2 * (max(taken) // 2 + 1)
    names = np.full(RZ + 1, RZ)
    names[data] = first + 2 * np.arange(len(data))
    run = np.cumsum(np.diff(np.where(fma, form["ra"].astype(np.int64), -np.arange(len(form)) - 1), prepend=-1) != 0)
    tile = np.searchsorted(code.starts, np.arange(len(form)), side="right")
    parts, place = [], []
    for half in (0, 1):
        copied = form[fma].copy() if half else form.copy()
        where = copied["op"] == Opcode.FFMA_IMM
        for name in ("rd", "ra", "rc"):
            register = names[copied[name][where]]
            copied[name][where] = np.where(register == RZ, RZ, register + half)
        if half:
            copied["wait"] = 0
        else:
            copied["rd"][load], copied["rb"][store] = names[form["rd"][load]], names[form["rb"][store]]
            copied["bytes"][load | store] = 8
        parts.append(copied)
        place.append(np.stack((run[fma] if half else run, np.full(len(copied), half))))
    order = np.lexsort(np.concatenate(place, axis=1)[::-1])
    every = np.concatenate(parts)[order]
    of_tile = np.concatenate((tile, tile[fma]))[order]
    pieces, starts, at = [], [], 0
    for number in range(1, len(code.starts) + 1):
        mine = every[of_tile == number]
        mine = mine[mine["op"] != Opcode.NOP]
        mine = np.concatenate((mine, scheduler.padding(len(mine))))
        pieces.append(mine)
        starts.append(at)
        at += len(mine)
    registers = first + 2 * len(data) + scheduler.HARDWARE_REGISTERS
    return replace(code, form=np.concatenate(pieces), starts=np.array(starts), registers=registers)


def build(matrix: SparseMatrix, n: int, tile: TileSize, schedule: Schedule, kind: Kind, store: Store) -> Kernel:
    """A kernel for n columns."""
    device = detect_device()
    words = n * kind.words // kind.columns
    problem = for_emitter(Problem(matrix, words, device), "sass")
    program = lower(problem, Candidate(tile, schedule, regroup(matrix, [tile.rows])[tile.rows]))
    emission: Emission = emit(program, "sass", device.arch)
    assert emission.machine is not None
    if kind.number != "float32":
        emission = replace(emission, machine=packed(emission.machine, DTYPES[kind.number], kind.pipes))
    if kind.words == 2:
        text = emission.units[0].replace("mul.wide.u32 %offset, %column, 4;", "mul.wide.u32 %offset, %column, 8;")
        text = text.replace(f"mov.u32 %n, {n};", f"mov.u32 %n, {n // 2};")
        emission = replace(emission, machine=doubled(emission.machine), units=(text,))
    binary = compile_kernel(emission, arch=device.arch, registers=255, store=store, workers=1)
    shape = grid(program.block_rows, n // kind.columns, tile.cols, schedule.column_group)
    return Kernel(binary.cubin, program.name, Launch(shape, tile.cols), binary.code_bytes)


def dense_micros(m: int, k: int, n: int, l2_bytes: int) -> float | None:
    """cuBLAS's product of float16 through torch, over copies of B and C that the L2 cache does not hold."""
    try:
        import torch
    except ImportError:
        return None
    count = copies_beyond_l2(2 * (k * n + m * n), l2_bytes)
    make = {"dtype": torch.float16, "device": "cuda"}
    a = torch.randn(m, k, **make)
    bs, cs = [torch.randn(k, n, **make) for _ in range(count)], [torch.empty(m, n, **make) for _ in range(count)]

    def run() -> None:
        for _ in range(-(-20 // count)):
            for b, c in zip(bs, cs, strict=True):
                torch.mm(a, b, out=c)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(30):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / (-(-20 // count) * count))
    return float(round(float(np.median(times[10:])), 2))


def records(problems: int) -> Iterator[dict[str, Any]]:
    driver, device = open_driver(), detect_device()
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        for known in KNOWN[:problems]:
            m, k, n = known[:3]
            matrix = uniform(m, k, known.sparsity, seed=0)
            about = {"device": device.name, "m": m, "k": k, "n": n, "sparsity": known.sparsity}
            best: dict[str, tuple[float, TileSize, Schedule]] = {}

            def timed(
                kind: Kind, choices: Sequence[tuple[TileSize, Schedule]], operands: Operands, effort: Effort = EFFORT
            ) -> Iterator[dict[str, Any]]:
                for tile, schedule in choices:
                    kernel = build(matrix, n, tile, schedule, kind, store)  # noqa: B023
                    found = operands.time(kernel, effort=effort)
                    if kind.name not in best or found["micros"] < best[kind.name][0]:  # noqa: B023
                        best[kind.name] = found["micros"], tile, schedule  # noqa: B023
                    yield {**about, "kind": kind.name, **tile._asdict(), "prefetch": schedule.prefetch,  # noqa: B023
                           "lockstep": schedule.lockstep, "code_bytes": kernel.code_bytes, **found}  # fmt: skip

            for number, kinds in (
                ("float32", (SINGLE, DOUBLE)),
                ("float16", (HALF, *OTHERS[:2])),
                ("bfloat16", OTHERS[2:]),
            ):
                operands = Operands(driver, matrix, n, DTYPES[number])
                for kind in kinds:
                    if kind in OTHERS:
                        yield from timed(kind, [best[HALF.name][1:]], operands)
                        continue
                    yield from timed(kind, tiles(m, n, kind, device.sms), operands)
                    _, tile, schedule = best[kind.name]
                    yield from timed(kind, [(tile, replace(schedule, lockstep=128))], operands)
                operands.close()
            yield {**about, "kind": "cuBLAS float16", "micros": dense_micros(m, k, n, driver.l2_bytes())}
    driver.close()


def summary(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    problems = dict.fromkeys((row["m"], row["k"], row["n"], row["sparsity"]) for row in rows)
    for problem in problems:
        mine = [row for row in rows if (row["m"], row["k"], row["n"], row["sparsity"]) == problem]
        for kind in dict.fromkeys(row["kind"] for row in mine):
            one = min((row for row in mine if row["kind"] == kind), key=lambda row: row["micros"] or 0)
            tile = f"{one['rows']} x {one['cols']}" if "rows" in one else ""
            lines.append(
                f"{problem!s:28} {kind:26} {one['micros']:8} us  {tile:10} prefetch {one.get('prefetch', '-')} "
                f"lockstep {one.get('lockstep', '-')} code {one.get('code_bytes', 0) >> 10} KiB "
                f"error max {one.get('max_relative_error', '-')} rms {one.get('rms_relative_error', '-')}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--problems", type=int, default=len(KNOWN))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with (options.out / "pairs.jsonl").open("w") as file:
        for row in records(options.problems):
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
