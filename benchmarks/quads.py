"""Prototype: four 16-bit columns to a thread, multiplied on the tensor cores by a weight times the unit matrix.

    python -m benchmarks.quads [--out DIR] [--problems NUMBER...] [--commit HASH]

needs an H200 or H100. ``HMMA.1688.F32`` multiplies 16 x 8 elements by 8 x 8 and adds to 16 x 8 sums in float32; a
thread holds 4 elements and the 4 sums of the same places. By the unit matrix times a weight, 8 of 64 places of which a
thread holds at most one, that is a multiply-add of 4 columns with sums in float32 and no conversion: ``LOP3`` makes the
matrix of a mask of the thread's lane. Code is 32 bytes a nonzero, of a quarter of the threads. What it costs: an
infinity or NaN in B spreads to 7 neighbouring columns, and columns come in warps of 128.

Machine code of words of 8 bytes is made by the scheduler as if they were float32; ``quads`` makes it that of 4 columns.
A multiply-add of registers stands for HMMA, whose bits are set in the cubin (``patched``). Writes ``quads.jsonl``.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.checked import Kernel, Operands
from benchmarks.kernels import commit_of
from benchmarks.kernels_table import KNOWN
from benchmarks.pairs import EFFORT, MORE
from lospmm.build import for_emitter
from lospmm.codegen.emission import Emission
from lospmm.codegen.sass.form import PT, RZ, Opcode, blank
from lospmm.codegen.sass.machine import MachineCode
from lospmm.codegen.sass.prologue import PADDED_BYTES, prologue
from lospmm.codegen.sass.scheduler import HARDWARE_REGISTERS, entry_of, padding, schedule_tile
from lospmm.device import DeviceSpec
from lospmm.dtype import DTYPES, Dtype
from lospmm.gpu.driver import open_driver
from lospmm.ir import grid
from lospmm.lower import lower
from lospmm.matrix import SparseMatrix
from lospmm.model import Candidate, Launch, Problem, Schedule, TileSize, ceil_div
from lospmm.reorder import regroup
from lospmm.runtime.detect import detect_device
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm.words import Words
from lospmm_datasets.synthetic import uniform

ROOT = Path(__file__).parents[1]

QUADS = Words("quads", 4, 8)
COLUMNS = QUADS.columns

#: Registers with weights in turn, how many multiply-adds ahead they are made, and from one to the next of a sum.
TURNS, AHEAD, LATENCY = 8, 4, 18

#: Cycles that one instruction can wait.
MOST_STALL = 15

SHOWN = (
    *("m", "n", "sparsity", "rows", "cols", "prefetch", "lockstep", "code_bytes"),
    *("micros", "max_relative_error", "rms_relative_error"),
)

#: The lanes' mask stands where a convolution's bits would: the prologue makes it.
MASK = """
.reg .b32 %padded, %lane, %part; .reg .pred %own;
mov.u32 %lane, %laneid; shr.u32 %part, %lane, 3; and.b32 %padded, %lane, 3;
setp.eq.u32 %own, %part, %padded; selp.b32 %padded, 65535, 0, %own;
and.b32 %part, %lane, 4; shl.b32 %part, %part, 2; shl.b32 %padded, %padded, %part;
"""

#: In a cubin: a multiply-add of registers, and what makes it HMMA.1688.F32.
FFMA, HMMA, FLOAT_SUMS = 0x223, 0x23C, 1 << 12


def quads(code: MachineCode, dtype: Dtype) -> MachineCode:
    """``code``, whose words are 8 bytes, as that of four columns of ``dtype``."""
    form = code.form
    mask, turns = 0, 2 * (int(form["ra"][np.isin(form["op"], (Opcode.LDG, Opcode.STG))].max()) // 2 + 1)
    pieces, starts, at, highest = [], [], 0, 0
    for start, end in zip(code.starts, [*code.starts[1:], len(form)], strict=True):
        names = _names(form[start:end], 4 * ceil_div(turns + TURNS, 4))
        tile = _tile(form[start:end], names, mask, turns, dtype)
        tile = np.concatenate((tile, padding(len(tile))))
        pieces.append(tile)
        starts.append(at)
        at += len(tile)
        highest = max(highest, int(names[:RZ].max()) + 3)
    assert highest + HARDWARE_REGISTERS < RZ
    entry = replace(code.entry, padded=mask)
    registers = highest + 1 + HARDWARE_REGISTERS
    return replace(code, form=np.concatenate(pieces), starts=np.array(starts), registers=registers, entry=entry)


def _names(form: NDArray[np.void], first: int) -> NDArray[np.int64]:
    """Four registers for each sum, and two for each element."""
    fma, load, store = (form["op"] == op for op in (Opcode.FFMA_IMM, Opcode.LDG, Opcode.STG))
    sums, buffers = np.unique(np.concatenate((form["rd"][fma], form["rb"][store]))), np.unique(form["rd"][load])
    sums = sums[sums != RZ]
    names = np.zeros(RZ + 1, np.int64)
    names[RZ] = RZ
    names[sums] = first + 4 * np.arange(len(sums))
    names[buffers] = first + 4 * len(sums) + 2 * np.arange(len(buffers))
    return names


def _tile(old: NDArray[np.void], names: NDArray[np.int64], mask: int, turns: int, dtype: Dtype) -> NDArray[np.void]:
    form = old[old["op"] != Opcode.NOP].copy()
    fmas = np.flatnonzero(form["op"] == Opcode.FFMA_IMM)
    stores = np.flatnonzero(form["op"] == Opcode.STG)
    loads = np.flatnonzero(form["op"] == Opcode.LDG)
    bits = dtype.to_storage(form["immediate"][fmas].view(np.float32)).view(np.uint16).astype(np.uint32)
    made = blank(len(fmas))
    made["op"], made["ra"], made["immediate"], made["carry"] = Opcode.LOP3_TEST, mask, bits << 16 | bits, PT
    made["rd"] = turns + np.arange(len(fmas)) % TURNS
    form["op"][fmas], form["immediate"][fmas], form["reuse"][fmas] = Opcode.FFMA, 0, 0
    form["rb"][fmas] = made["rd"]
    for operand in ("rd", "ra", "rc"):
        form[operand][fmas] = names[form[operand][fmas]]
    form["rd"][loads], form["rb"][stores] = names[form["rd"][loads]], names[form["rb"][stores]]
    held = form["rb"][stores]
    held = held[held != RZ]
    rounded = blank(2 * len(held))
    rounded["op"] = {"float16": Opcode.F2FP_F16, "bfloat16": Opcode.F2FP_BF16}[dtype.name]
    for half in (0, 1):
        rounded["rd"][half::2], rounded["rb"][half::2], rounded["ra"][half::2] = (
            held + half,
            held + 2 * half,
            held + 2 * half + 1,
        )
    if len(held):
        rounded["stall"][-1] = 8
    if len(fmas):  # the last sums
        form["stall"][fmas[-1]], form["yields"][fmas[-1]] = 15, 1
        last = blank(1)
        last["op"], last["stall"], last["yields"] = Opcode.NOP, 12, 1
        rounded = np.concatenate((last, rounded))
    at = [
        *fmas[np.maximum(np.arange(len(fmas)) - AHEAD, 0)] + (np.arange(len(fmas)) >= AHEAD),
        *[stores[0]] * len(rounded),
    ]
    ahead = made[:AHEAD]
    if len(ahead):
        ahead["stall"][-1] = made["stall"][-1] = 6
    out = np.insert(form, at, np.concatenate((made, rounded)))
    return _waited(out)


def _waited(tile: NDArray[np.void]) -> NDArray[np.void]:
    """With stalls between multiply-adds of one sum, and instructions that do nothing where one stall is too short."""
    issued = np.cumsum(np.maximum(tile["stall"], 1), dtype=np.int64) - np.maximum(tile["stall"], 1)
    uses = np.flatnonzero(tile["op"] == Opcode.FFMA)
    order = np.argsort(tile["rd"][uses], kind="stable")
    earlier, later = uses[order[:-1]], uses[order[1:]]
    same = tile["rd"][earlier] == tile["rd"][later]
    shift = 0
    # In the order of issue: a stall helps all behind it.
    pairs = sorted(zip(later[same].tolist(), earlier[same].tolist(), strict=True))
    added = np.zeros(len(tile) + 1, np.int64)
    total = np.zeros(len(tile) + 1, np.int64)
    position = 0
    for second, first in pairs:
        while position <= second:
            total[position] = shift
            position += 1
        missing = LATENCY - (issued[second] + shift - issued[first] - total[first])
        if missing > 0:
            added[second - 1] += missing
            shift += missing
            total[second] = shift
    stall = np.maximum(tile["stall"].astype(np.int64), 1) + added[:-1]
    # Not before the instruction: it may be the very one whose sum is waited for.
    idle = (stall - 1) // MOST_STALL
    where = np.repeat(np.arange(len(tile)), idle)
    idles = blank(len(where))
    idles["op"], idles["stall"] = Opcode.NOP, MOST_STALL
    first = np.flatnonzero(np.diff(where, prepend=-1))
    idles["stall"][first] = (stall - MOST_STALL * idle)[where[first]]
    tile["stall"] = np.minimum(stall, MOST_STALL)
    tile = np.insert(tile, where + 1, idles)
    tile["yields"] = np.where((tile["stall"] > 11) | (tile["yields"] == 1), 1, 0)
    tile["reuse"][tile["yields"] == 1] = 0
    return tile


def patched(cubin: bytes) -> bytes:
    """With HMMA for each multiply-add of registers: 16 bytes at a multiple of 16 each, in the kernel's section."""
    words = np.frombuffer(cubin[: len(cubin) // 16 * 16], "<u8").reshape(-1, 2).copy()
    where = (words[:, 0] & 0xFFF == FFMA) & (words[:, 1] >> 32 != 0) & (words[:, 0] >> 12 & 0xF == PT)
    words[where, 0] = words[where, 0] & ~np.uint64(0xFFF) | np.uint64(HMMA)
    words[where, 1] |= np.uint64(FLOAT_SUMS)
    return words.astype("<u8").tobytes() + cubin[len(words) * 16 :]


def build(device: DeviceSpec, matrix: SparseMatrix, n: int, choice: tuple[TileSize, Schedule], store: Store) -> Kernel:
    """A kernel for n columns, 128 in a warp."""
    tile, schedule = choice
    problem = for_emitter(Problem(matrix, n // COLUMNS, device), "sass")
    program = lower(problem, Candidate(tile, schedule, regroup(matrix, [tile.rows])[tile.rows]))
    program = replace(program, words=QUADS)
    forms = [schedule_tile(one, program)[0] for one in program.tiles]
    starts = np.cumsum([0, *(len(form) for form in forms[:-1])])
    code = MachineCode(np.concatenate(forms), starts, program.dispatch, 255, entry_of(program), device.arch)
    code = quads(code, DTYPES["float16"])
    text = prologue(program, device.arch).replace("@%outside exit;", "@%outside exit;" + MASK)
    for offset in (0, 4):
        stored = f"st.global.L1::no_allocate.f32 [%c+{offset}], %value;"
        assert text.count(stored) == 1
        text = text.replace(stored, f"{stored}\nst.global.L1::no_allocate.b32 [%c+{offset + PADDED_BYTES}], %padded;")
    emission = Emission(language="sass", entry=program.name, source="", units=(text,), machine=code)
    binary = compile_kernel(emission, arch=device.arch, registers=255, store=store, workers=1)
    shape = grid(program.block_rows, n // COLUMNS, tile.cols, schedule.column_group)
    return Kernel(patched(binary.cubin), program.name, Launch(shape, tile.cols), binary.code_bytes)


def tiles(m: int, n: int, sms: int) -> list[tuple[TileSize, Schedule]]:
    """Of one, two and three blocks an SM."""
    found = {}
    for width in (128, 192, 256, 320, 384, 512, 704):
        for waves in (1, 2, 3):
            across = ceil_div(n // COLUMNS, width)
            rows = ceil_div(m, max(waves * sms // across, 1))
            room = (min(255, 65_536 // (ceil_div(width, 128) * 128) // waves // 8 * 8) - 20 - 4 * rows) // 2
            for depth in (48, 36, 24, 16, 8):
                if depth <= room and rows >= 4:
                    found[TileSize(rows, width), Schedule(depth, None, 2 if across > 1 else 1)] = None
                    break
    return list(found)


def records(problems: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A line for each kernel: of each problem every tile, without barriers and with one every 128 instructions."""
    device, driver = detect_device(), open_driver()
    with tempfile.TemporaryDirectory() as directory, ProcessPoolExecutor(settings().workers) as pool:
        store = Store(Path(directory))
        for known in ((*KNOWN, *MORE)[at] for at in problems):
            matrix = uniform(known.m, known.k, known.sparsity, seed=0)
            choices = tiles(known.m, known.n, device.sms)
            choices += [(tile, replace(schedule, lockstep=128)) for tile, schedule in choices]
            built = [(choice, pool.submit(build, device, matrix, known.n, choice, store)) for choice in choices]
            operands = Operands(driver, matrix, known.n, DTYPES["float16"])
            for (tile, schedule), future in built:
                kernel = future.result()
                yield {**dict(zip("mkn", known[:3], strict=True)), "sparsity": known.sparsity, "device": device.name,
                       "kind": "float16, quads", **tile._asdict(), "prefetch": schedule.prefetch,
                       "lockstep": schedule.lockstep, "code_bytes": kernel.code_bytes,
                       **operands.time(kernel, effort=EFFORT)}  # fmt: skip
            operands.close()
    driver.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--problems", type=int, nargs="*", default=[2, 7, 8, 1])
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    options = parser.parse_args()
    commit = options.commit or commit_of(ROOT)
    with (options.out / "quads.jsonl").open("w") as file:
        for row in records(options.problems):
            print(json.dumps({**row, "commit": commit}), file=file, flush=True)
            print(*(row[name] for name in SHOWN), flush=True)


if __name__ == "__main__":
    main()
