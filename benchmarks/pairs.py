"""Two columns to a thread, as two float32 and as pairs of 16-bit numbers in the registers of one; 16-bit columns one
by one, with sums in float32.

    python -m benchmarks.pairs [--out DIR] [--problems NUMBER...] [--kinds NAME...] [--name NAME]

needs an H200 or H100. For each of the seven problems, and MORE as numbers 7 and up, kernels of float32, of two float32
a thread, of float16 and of float16 with float32 sums are timed over tile sizes of one and two blocks an SM (``tiles``),
and the fastest of float16 again with its multiply-adds in either pipe alone, and as bfloat16; cuBLAS multiplies the
same sizes as a dense product, where torch is there. Errors are against float64, for A and B as they were rounded.
Writes ``pairs.jsonl`` and prints a line per problem and kind.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.checked import Kernel, Operands
from benchmarks.kernels_table import KNOWN, Known
from lospmm import words as words_of_thread
from lospmm.build import for_emitter
from lospmm.codegen.emission import Emission
from lospmm.codegen.sass import scheduler
from lospmm.codegen.sass.emit import without_fetch
from lospmm.codegen.sass.form import RZ, Opcode
from lospmm.codegen.sass.half import packed
from lospmm.codegen.sass.machine import MachineCode
from lospmm.device import DeviceSpec
from lospmm.dtype import DTYPES
from lospmm.gpu.driver import Driver, open_driver
from lospmm.gpu.timing import Effort, copies_beyond_l2
from lospmm.ir import grid
from lospmm.lower import lower
from lospmm.matrix import SparseMatrix
from lospmm.model import Candidate, Launch, Problem, Schedule, TileSize, ceil_div
from lospmm.reorder import regroup
from lospmm.runtime.detect import detect_device
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm_datasets.synthetic import uniform

WIDTHS = (256, 384, 512, 608, 704, 832, 1024)
PREFETCHES = (72, 48, 32, 24, 16)
PREFETCH = 24
EFFORT = Effort(replays=7, warm_micros=2_000.0)

#: Of a register file of 65,536 by threads, in steps of 8; and what a tile needs beside accumulators and buffers.
REGISTERS, BESIDE = 65_536, 14

Form = NDArray[np.void]
Choice = tuple[TileSize, Schedule]


@dataclass(frozen=True, slots=True)
class Kind:
    """``words`` are the registers that hold an element of B; a thread has ``columns`` columns in them."""

    name: str
    number: str
    words: int
    columns: int
    pipes: tuple[int, ...] = (0,)
    reuse: bool = False
    is_narrow: bool = False  # columns of 16 bits, with their sums in float32

    @property
    def element_bytes(self) -> int:
        return 2 if self.number != "float32" else 4 * self.words // self.columns


SINGLE = Kind("float32", "float32", 1, 1)
DOUBLE = Kind("float32, two columns", "float32", 2, 2)
HALF = Kind("float16", "float16", 1, 2)
NARROW = Kind("float16, float32 sums", "float16", 1, 1, is_narrow=True)
NARROW_PAIRS = Kind("float16, float32 sums, two columns", "float16", 2, 2, is_narrow=True)

#: Timed with the tile size that is the fastest of another kind.
OTHERS = {
    replace(HALF, name="float16, HFMA2.MMA", pipes=(1,)): HALF,
    replace(HALF, name="float16, in turns", pipes=(0, 1)): HALF,
    replace(HALF, name="bfloat16", number="bfloat16"): HALF,
    replace(NARROW, name="bfloat16, float32 sums", number="bfloat16"): NARROW,
    replace(NARROW_PAIRS, name="bfloat16, float32 sums, two columns", number="bfloat16"): NARROW_PAIRS,
}

#: Problems beside the seven: of datasets/shapes.toml, where dense products have little to do.
MORE = (Known(768, 768, 4096, 0.95, 0, 0), Known(512, 128, 12544, 0.95, 0, 0), Known(1024, 256, 3136, 0.95, 0, 0))

#: Kernels in which few multiply-adds are kept in the reuse cache, and registers are soon loaded anew; and how often.
RARE = (TileSize(12, 512), TileSize(9, 704), TileSize(9, 832))
RUNS = 10
MOST_OF_REUSE = 0.95  # a share of zeros
KINDS = (SINGLE, DOUBLE, HALF, NARROW, NARROW_PAIRS, *OTHERS)


def tiles(m: int, n: int, kind: Kind, sms: int) -> list[Choice]:
    """Tile sizes of one and of two blocks an SM, as few rows as that leaves, each with the deepest prefetch that fits
    and with PREFETCH."""
    found = {}
    threads = n // kind.columns
    widths = WIDTHS[:2] if kind == DOUBLE else WIDTHS
    for width in (width for width in widths if width <= ceil_div(threads, 32) * 32):
        for waves in (1, 2):
            across = ceil_div(threads, width)
            rows = ceil_div(m, max(waves * sms // across, 1))
            warps = ceil_div(width, 128) * 4  # the four parts of an SM have as many each
            room = (min(255, REGISTERS // (32 * warps) // 8 * 8) - BESIDE) // kind.words - rows
            deepest = next((depth for depth in PREFETCHES if depth <= room), 0)
            for depth in {deepest, min(deepest, PREFETCH)} - {0}:
                if rows >= min(8, m):
                    found[TileSize(rows, width), Schedule(depth, None, 2 if across > 1 else 1)] = None
    return list(found)


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


def build(device: DeviceSpec, matrix: SparseMatrix, n: int, choice: Choice, kind: Kind, store: Store) -> Kernel:
    """A kernel for n columns."""
    tile, schedule = choice
    words = n * kind.words // kind.columns
    dtype = DTYPES[kind.number] if kind.is_narrow else DTYPES["float32"]
    problem = for_emitter(Problem(matrix, words, device, dtype=dtype), "sass")
    program = lower(problem, Candidate(tile, schedule, regroup(matrix, [tile.rows])[tile.rows]))
    if kind.is_narrow and kind.columns == 2:
        program = replace(program, n=n // 2, words=words_of_thread.DOUBLE)
    emission: Emission = without_fetch(program, device.arch)
    assert emission.machine is not None
    if kind.number != "float32" and not kind.is_narrow:
        emission = replace(
            emission, machine=packed(emission.machine, DTYPES[kind.number], kind.pipes, reuse=kind.reuse)
        )
    if kind == DOUBLE:
        assert emission.machine is not None
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


def records(problems: Sequence[int], kinds: Sequence[Kind]) -> Iterator[dict[str, Any]]:
    device = detect_device()
    with tempfile.TemporaryDirectory() as directory, ProcessPoolExecutor(settings().workers) as pool:
        store = Store(Path(directory))
        works = [Work(device, (*KNOWN, *MORE)[at], kinds, store, pool) for at in problems]
        driver = open_driver()
        for work in works:
            for number in ("float32", "float16", "bfloat16"):
                operands = Operands(driver, work.matrix, work.n, DTYPES[number])
                for kind in (kind for kind in kinds if kind.number == number):
                    yield from work.timed(kind, operands)
                operands.close()
            if work.about["sparsity"] > MOST_OF_REUSE and len(kinds) == len(KINDS):
                yield from work.reused(driver)
            micros = dense_micros(work.matrix.m, work.matrix.k, work.n, driver.l2_bytes())
            yield {**work.about, "kind": "cuBLAS float16", "micros": micros}
        driver.close()


class Work:
    """A problem, whose kernels are being built."""

    def __init__(self, device: DeviceSpec, known: Known, kinds: Sequence[Kind], store: Store, pool: Executor) -> None:
        self.device, self.store, self.n = device, store, known.n
        self.matrix = uniform(known.m, known.k, known.sparsity, seed=0)
        self.about: dict[str, Any] = {
            "device": device.name,
            **dict(zip("mkn", known[:3], strict=True)),
            "sparsity": known.sparsity,
        }
        self.best: dict[str, tuple[float, Choice]] = {}
        self.built = [
            (kind, choice, pool.submit(build, device, self.matrix, self.n, choice, kind, store))
            for kind in kinds
            if kind not in OTHERS
            for choice in tiles(known.m, known.n, kind, device.sms)
        ]

    def timed(self, kind: Kind, operands: Operands) -> Iterator[dict[str, Any]]:
        """Every tile size, and the fastest with barriers; of other pipes and types, that of float16."""
        if kind in OTHERS:
            yield self._one(kind, self.best[OTHERS[kind].name][1], operands)
            return
        for own, choice, kernel in self.built:
            if own == kind:
                yield self._one(kind, choice, operands, kernel.result())
        tile, schedule = self.best[kind.name][1]
        yield self._one(kind, (tile, replace(schedule, lockstep=128)), operands)

    def reused(self, driver: Driver) -> Iterator[dict[str, Any]]:
        """Kernels of float16 by pipe, with the reuse cache and without: elements that are far off, in all runs."""
        operands = Operands(driver, self.matrix, self.n, DTYPES["float16"])
        for tile in RARE:
            for pipes in ((0,), (1,), (0, 1)):
                for reuse in (False, True):
                    kind = replace(HALF, name="reuse", pipes=pipes, reuse=reuse)
                    kernel = build(
                        self.device, self.matrix, self.n, (tile, Schedule(PREFETCH, None, 2)), kind, self.store
                    )
                    wrong = sum(operands.far_off(kernel) for _ in range(RUNS))
                    yield {**self.about, "kind": "reuse", **tile._asdict(), "pipes": pipes, "reuse": reuse,
                           "runs": RUNS, "wrong": wrong, "elements": RUNS * operands.expected.size,
                           "micros": 0.0}  # fmt: skip
        operands.close()

    def _one(self, kind: Kind, choice: Choice, operands: Operands, kernel: Kernel | None = None) -> dict[str, Any]:
        kernel = kernel or build(self.device, self.matrix, self.n, choice, kind, self.store)
        found = operands.time(kernel, effort=EFFORT)
        self.best[kind.name] = min(self.best.get(kind.name, (math.inf, choice)), (found["micros"], choice), key=_micros)
        tile, schedule = choice
        return {**self.about, "kind": kind.name, **tile._asdict(), "prefetch": schedule.prefetch,
                "lockstep": schedule.lockstep, "code_bytes": kernel.code_bytes, **found}  # fmt: skip


def _micros(timed: tuple[float, Choice]) -> float:
    return timed[0]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    problems = dict.fromkeys((row["m"], row["k"], row["n"], row["sparsity"]) for row in rows)
    for problem in problems:
        mine = [row for row in rows if (row["m"], row["k"], row["n"], row["sparsity"]) == problem]
        lines += [str({name: row[name] for name in ("rows", "cols", "pipes", "reuse", "wrong", "elements")})
                  for row in mine if row["kind"] == "reuse"]  # fmt: skip
        mine = [row for row in mine if row["kind"] != "reuse"]
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
    parser.add_argument("--problems", type=int, nargs="*", default=range(len(KNOWN)))
    parser.add_argument("--kinds", nargs="*", choices=[kind.name for kind in KINDS])
    parser.add_argument("--name", default="pairs", help="of the file, without .jsonl")
    options = parser.parse_args()
    kinds = [kind for kind in KINDS if options.kinds is None or kind.name in options.kinds]
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with (options.out / f"{options.name}.jsonl").open("w") as file:
        for row in records(options.problems, kinds):
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
