"""Some SMs begin later than others, so that they load while the others store.

    python -m benchmarks.delays [--out DIR]

needs an H200 or H100. All blocks of a wave load at the same time and store at the same time: first the L2 cache is
waited for, then memory. Of the kernels that ``benchmarks.kernels`` found for the larger shapes and problems, those
blocks of the first wave that ``PARTS`` says wait for some cycles before their first load. Forms take turns. Writes
``delays.jsonl`` and prints a line per kernel.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from benchmarks.checked import Kernel
from benchmarks.early import Built, CaseOf, timed
from benchmarks.kernels import ROOT, SEED
from benchmarks.recorded import record
from lospmm.build import for_emitter
from lospmm.codegen import emit
from lospmm.device import DeviceSpec
from lospmm.ir import launch
from lospmm.lower import lower
from lospmm.model import Candidate, Problem, Schedule, TileSize
from lospmm.reorder import regroup
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm_datasets.synthetic import uniform

SPARSITIES = (0.98, 0.9)

#: Bytes of B and C from which on a shape is timed.
BYTES = 15e6

#: Behind this line of the prologue blocks wait.
TILE_FOUND = "mov.u32 %tile, %ctaid.y;"

#: Which blocks wait: PTX that leaves 1 in %waits for them, else 0.
PARTS: Mapping[str, str] = {
    "every other tile": "and.b32 %waits, %tile, 1;",
    "every other TPC": "mov.u32 %waits, %smid; shr.u32 %waits, %waits, 1; and.b32 %waits, %waits, 1;",
    "the upper half": "mov.u32 %waits, %smid; setp.ge.u32 %later, %waits, SMS; selp.u32 %waits, 1, 0, %later;",
}
CYCLES = (1000, 2000, 4000, 8000)

#: Only in the first wave, of a block to an SM.
WAIT = """
.reg .b32 %waits, %wave, %begun, %now; .reg .pred %later;
PART
mov.u32 %wave, %ctaid.z; mov.u32 %now, %nctaid.y; mad.lo.u32 %wave, %wave, %now, %tile;
mov.u32 %now, %nctaid.x; mul.lo.u32 %wave, %wave, %now; mov.u32 %now, %ctaid.x; add.u32 %wave, %wave, %now;
setp.lt.u32 %later, %wave, ALL; selp.u32 %wave, 1, 0, %later; and.b32 %waits, %waits, %wave;
setp.eq.u32 %later, %waits, 0; @%later bra BEGIN;
mov.u32 %begun, %clock;
WAITING: mov.u32 %now, %clock; sub.u32 %now, %now, %begun;
setp.lt.u32 %later, %now, CYCLES; @%later bra WAITING;
BEGIN:
"""

Tile = tuple[TileSize, Schedule]


def tile_of(found: Mapping[str, Any]) -> Tile:
    """As a line of kernels.jsonl has it."""
    axes = {field.name: found[field.name] for field in fields(Schedule) if field.name in found}
    return TileSize(found["rows"], found["cols"]), Schedule(**axes)


def wanted() -> Iterator[CaseOf[Tile]]:
    """Of each shape what was found to be the fastest, where B and C are large."""
    seen: dict[tuple[tuple[int, int, int], float], list[Tile]] = {}
    for line in (ROOT / "benchmarks" / "results" / "kernels.jsonl").read_text().splitlines():
        one = json.loads(line)
        m, k, n = one["m"], one["k"], one["n"]
        is_large = 4 * n * (m + k) >= BYTES
        if one["set"] != "real" and one["drawn_sparsity"] in SPARSITIES and one.get("tile") and is_large:
            tiles = seen.setdefault(((m, k, n), one["drawn_sparsity"]), [])
            if (tile := tile_of(one["tile"])) not in tiles:
                tiles.append(tile)
    for (gemm, sparsity), tiles in seen.items():
        yield gemm, sparsity, tuple(tiles)


def build(case: CaseOf[Tile], device: DeviceSpec, folder: str) -> Built:
    """Each kernel as it is, once more, and with every part and number of cycles."""
    (m, k, n), sparsity, tiles = case
    problem = for_emitter(Problem(uniform(m, k, sparsity, seed=SEED), n, device), "sass")
    waits = {"as it is": "", "once more": ""}
    for part, cycles in itertools.product(PARTS, CYCLES):
        text = WAIT.replace("PART", PARTS[part]).replace("CYCLES", str(cycles))
        waits[f"{part}, {cycles}"] = text.replace("SMS", str(device.sms // 2)).replace("ALL", str(device.sms))
    found: Built = []
    for tile, schedule in tiles:
        program = lower(problem, Candidate(tile, schedule, regroup(problem.matrix, [tile.rows])[tile.rows]))
        emission, shape = emit(program, "sass", device.arch), launch(program)
        for name, text in waits.items():
            (unit,) = emission.units
            assert unit.count(TILE_FOUND) == 1, "no place to wait in"
            late = replace(emission, units=(unit.replace(TILE_FOUND, TILE_FOUND + text),))
            binary = compile_kernel(late, arch=device.arch, registers=program.registers, store=Store(Path(folder)),
                                    workers=1)  # fmt: skip
            labels = {**tile._asdict(), "walks": schedule.walks, "blocks": math.prod(shape.grid)}  # fmt: skip
            found.append((name, labels, Kernel(binary.cubin, program.name, shape, binary.code_bytes)))
    return found


def main() -> None:
    record("delays", timed([*wanted()], build), description=__doc__)


if __name__ == "__main__":
    main()
