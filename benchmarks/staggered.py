"""Stores at the end of a kernel that overlap with its loads, or find their lines in the L2 cache.

    python -m benchmarks.staggered [--out DIR]

needs an H200 or H100. A block stores everything behind its loads, when all others do the same, and memory has to take
back what earlier kernels wrote. Two ways to spread that are timed, on the fastest known tiles of some shapes at 98 %
zeros and others of 256 columns (``CASES``):

- *staggered*: the threads of a block from bit 7 of their number on wait with their first load until the others have
  issued their last one, so that these store while those load.
- *C claimed*: one word of each line of C is stored as zero ("zeros"), or one sector of it loaded into no register
  ("touched"), by the block and the warp that store it later: at the beginning, or behind the first loads.

Also timed: the same kernels without stores. Each kernel is checked but the last. Forms take turns. Writes
``staggered.jsonl`` and prints a line per kernel.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.ablation import Code, blanked, each_tile
from benchmarks.checked import Kernel
from benchmarks.early import Built, CaseOf, timed
from benchmarks.kernels import SEED
from benchmarks.recorded import record
from lospmm.build import for_emitter
from lospmm.codegen.emission import Emission
from lospmm.codegen.sass.emit import tiles_of
from lospmm.codegen.sass.fetch import FETCHED
from lospmm.codegen.sass.form import RZ, Opcode, blank
from lospmm.codegen.sass.layer import PREDICATE_LATENCY
from lospmm.codegen.sass.machine import ENTRY, MachineCode
from lospmm.codegen.sass.prologue import prologue
from lospmm.device import DeviceSpec
from lospmm.ir import launch
from lospmm.lower import lower
from lospmm.model import Candidate, Problem, Schedule, TileSize
from lospmm.reorder import regroup
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm_datasets.synthetic import uniform

#: The prologue leaves 32 times a thread's number in a register: the bit of its number that says which half it is of.
HALF = 128 * 32

#: The predicates of a thread of the second half, and of one whose element is not the first of a line.
LATER, INNER = 5, 6
BETWEEN_LINES = 0x7C

BARRIER = 1

#: (M, K, N), sparsity, and tiles with prefetches.
CASES = (
    ((768, 768, 4096), 0.98, ((96, 256, 144, 4), (96, 256, 72, 4), (110, 256, 136, 4), (128, 256, 116, 4))),
    ((1024, 512, 3136), 0.98, ((104, 256, 72, 2), (104, 256, 140, 2))),
    ((512, 1024, 3136), 0.98, ((52, 256, 72, 2), (52, 256, 190, 2))),
    ((1024, 256, 3136), 0.98, ((81, 352, 72, 2), (104, 256, 140, 2))),
    ((256, 1024, 3136), 0.98, ((29, 224, 72, 1), (29, 224, 200, 1))),
    ((2048, 1024, 784), 0.98, ((63, 224, 144, 0),)),
    ((2048, 512, 784), 0.98, ((64, 224, 72, 0), (64, 224, 180, 0))),
    ((512, 2048, 784), 0.98, ((16, 224, 200, 0),)),
    ((512, 128, 12544), 0.98, ((46, 128, 72, 1), (128, 256, 72, 1), (192, 256, 48, 1))),
    ((512, 256, 12544), 0.98, ((131, 384, 24, 2), (192, 256, 48, 1))),
    ((64, 64, 50176), 0.98, ((25, 384, 72, 0), (64, 256, 56, 0))),
    ((256, 2304, 3136), 0.98, ((20, 320, 72, 1),)),
    ((3072, 768, 4096), 0.98, ((128, 384, 24, 4),)),
)  # fmt: skip


def _predicate(register: int, bits: int, predicate: int) -> Code:
    form = blank(1)
    form["op"], form["ra"], form["immediate"], form["carry"] = Opcode.LOP3_TEST, register, bits, predicate
    form["stall"], form["yields"] = PREDICATE_LATENCY, 1
    return form


def _meeting(*, is_first: bool) -> Code:
    form = blank(1)
    form["op"], form["immediate"], form["predicate"], form["predicate_negated"] = (
        Opcode.BAR_SYNC, BARRIER, LATER, is_first)  # fmt: skip
    form["stall"], form["yields"] = 6, 1
    return form


def _claims(tile: Code, *, is_stored: bool) -> Code:
    """Of every line that the tile stores; addresses that are far are left out."""
    form = tile[(tile["op"] == Opcode.STG) & (tile["ra"] == ENTRY.c)].copy()
    plain = blank(len(form))
    for field in ("ra", "ur", "offset"):
        plain[field] = form[field]
    plain["op"], plain["stall"] = Opcode.STG if is_stored else Opcode.TOUCH, 2
    if is_stored:
        plain["bytes"], plain["rb"] = form["bytes"], RZ
    plain["predicate"], plain["predicate_negated"] = INNER, 1
    return plain


def _staggered(tile: Code) -> Code:
    loads = np.flatnonzero(tile["op"] == Opcode.LDG)
    if not len(loads):
        return tile
    last = int(loads[-1]) + 1
    return np.concatenate(
        [_predicate(FETCHED, HALF, LATER), _meeting(is_first=False), tile[:last], _meeting(is_first=True), tile[last:]]
    )


def _claimed(tile: Code, *, is_stored: bool, is_late: bool) -> Code:
    waits = np.flatnonzero((tile["wait"] != 0) & (tile["op"] == Opcode.FFMA_IMM))
    at = int(waits[0]) if is_late and len(waits) else 0
    return np.concatenate(
        [tile[:at], _predicate(ENTRY.c, BETWEEN_LINES, INNER), _claims(tile, is_stored=is_stored), tile[at:]]
    )


FORMS: dict[str, Callable[[MachineCode], MachineCode]] = {
    "plain": lambda code: code,
    "staggered": lambda code: each_tile(code, _staggered),
    "touched": lambda code: each_tile(code, lambda tile: _claimed(tile, is_stored=False, is_late=False)),
    "touched late": lambda code: each_tile(code, lambda tile: _claimed(tile, is_stored=False, is_late=True)),
    "zeros": lambda code: each_tile(code, lambda tile: _claimed(tile, is_stored=True, is_late=False)),
    "zeros late": lambda code: each_tile(code, lambda tile: _claimed(tile, is_stored=True, is_late=True)),
    "zeros, staggered": lambda code: each_tile(
        code, lambda tile: _claimed(_staggered(tile), is_stored=True, is_late=False)),
    "without stores": lambda code: blanked(code, Opcode.STG),
}  # fmt: skip

Case = CaseOf[tuple[int, int, int, int]]


def build(case: Case, device: DeviceSpec, folder: str) -> Built:
    (m, k, n), sparsity, tiles = case
    problem = for_emitter(Problem(uniform(m, k, sparsity, seed=SEED), n, device), "sass")
    found = []
    for rows, cols, prefetch, group in tiles:
        schedule = Schedule(prefetch, None, group, 0)
        program = lower(problem, Candidate(TileSize(rows, cols), schedule, regroup(problem.matrix, [rows])[rows]))
        code = tiles_of(program, device.arch)
        for name, change in FORMS.items():
            changed = replace(change(code), entry=replace(code.entry, fetched=FETCHED))
            emission = Emission(language="sass", entry=program.name, source="",
                                units=(prologue(program, device.arch, sharers=1),), machine=changed)  # fmt: skip
            binary = compile_kernel(emission, arch=device.arch, registers=program.registers,
                                    store=Store(Path(folder)), workers=1)  # fmt: skip
            labels = {"rows": rows, "cols": cols, "prefetch": prefetch, "column_group": group,
                      "registers": changed.registers}  # fmt: skip
            found.append((name, labels, Kernel(binary.cubin, program.name, launch(program), binary.code_bytes)))
    return found


def main() -> None:
    record("staggered", timed(CASES, build), description=__doc__)


if __name__ == "__main__":
    main()
