"""Blocks without columns of C behind all others, not between them.

    python -m benchmarks.idle_blocks [--out DIR]

needs an H200 or H100. A grid has whole groups of column blocks (``lospmm.ir.grid``), and so, where the last group has
fewer, blocks without columns between those of the last group. They leave at once, but each has a place on an SM first:
of 512 x 1024 by 3136 columns, 126 blocks of 144 have columns, and would fit 132 SMs. Of the tiles that searches found
for the seven problems and the 41 shapes, those that come in such groups are timed as they are ("between"), with the
blocks of the last group numbered anew ("last"), and in the other groups of ``COLUMN_GROUPS``, as a search would choose.
Forms take turns. Writes ``idle_blocks.jsonl`` and prints a line per kernel.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks import delays, early
from benchmarks.checked import Kernel
from benchmarks.early import Built, CaseOf, timed
from benchmarks.kernels import SEED
from benchmarks.recorded import record
from lospmm.build import for_emitter
from lospmm.codegen import emit
from lospmm.codegen.emission import Emission
from lospmm.device import DeviceSpec
from lospmm.ir import launch
from lospmm.lower import lower
from lospmm.model import COLUMN_GROUPS, Candidate, Problem, Schedule, TileSize, ceil_div
from lospmm.reorder import regroup
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm_datasets.synthetic import uniform

SPARSITIES = (0.98, 0.95)

#: Of B: with more, blocks come in many waves.
MOST_COLUMNS = 12_544

#: Of which an SM takes two blocks.
SMALL_BLOCKS = (((512, 1024, 3136), 0.98), (TileSize(58, 224), Schedule(56)))

#: Behind this line of the prologue, those of the last group find their tile and their column block.
PLACE_FOUND = "mov.u32 %member, %ctaid.x;"

#: GROUPS are whole, and SHORT column blocks are in the last one. Who is behind its last block leaves.
NUMBERED_ANEW = """
.reg .pred %last; .reg .b32 %number, %row, %place, %rows;
mad.lo.u32 %number, %tile, %members, %member;
div.u32 %row, %number, SHORT; mul.lo.u32 %place, %row, SHORT; sub.u32 %place, %number, %place;
setp.ge.u32 %last, %group, GROUPS;
selp.u32 %tile, %row, %tile, %last; selp.u32 %member, %place, %member, %last;
mov.u32 %rows, %nctaid.y; setp.ge.u32 %outside, %tile, %rows; @%outside exit;
"""


def groups_of(n: int, tile: delays.Tile, column_group: int) -> tuple[int, int, int]:
    """Column blocks of a group, groups that are whole, and the column blocks of a last one that is not, or 0."""
    size, schedule = tile
    block_cols = ceil_div(n, size.cols * schedule.walks)
    together = min(column_group or block_cols, block_cols)
    return together, *divmod(block_cols, together)


def groups(n: int, tile: delays.Tile) -> tuple[int, ...]:
    """The groups that make different grids, if any of them leaves blocks without columns."""
    seen = {groups_of(n, tile, group): group for group in COLUMN_GROUPS}
    return tuple(seen.values()) if any(short for _, _, short in seen) else ()


def wanted() -> Iterator[CaseOf[delays.Tile]]:
    """What was found first of each shape, where blocks do not share tiles; the largest B and C first."""
    every = [*delays.wanted(), *early.cases(SPARSITIES)]
    tiles: dict[tuple[tuple[int, int, int], float], delays.Tile] = {}
    for gemm, sparsity, found in sorted(every, key=lambda case: -case[0][2] * (case[0][0] + case[0][1])):
        for size, schedule in found:
            if schedule.split_k == 1 and gemm[2] <= MOST_COLUMNS and groups(gemm[2], (size, schedule)):
                tiles.setdefault((gemm, sparsity), (size, schedule))
    for (gemm, sparsity), tile in tiles.items():
        yield gemm, sparsity, (tile, SMALL_BLOCKS[1]) if (gemm, sparsity) == SMALL_BLOCKS[0] else (tile,)


def numbered_anew(emission: Emission, whole: int, short: int) -> Emission:
    (unit,) = emission.units
    assert unit.count(PLACE_FOUND) == 1, "the prologue says nothing of a place in the grid"
    text = NUMBERED_ANEW.replace("SHORT", str(short)).replace("GROUPS", str(whole))
    return replace(emission, units=(unit.replace(PLACE_FOUND, PLACE_FOUND + text),))


def build(case: CaseOf[delays.Tile], device: DeviceSpec, folder: str) -> Built:
    (m, k, n), sparsity, tiles = case
    problem = for_emitter(Problem(uniform(m, k, sparsity, seed=SEED), n, device), "sass")
    tilings = regroup(problem.matrix, sorted({size.rows for size, _ in tiles}))
    found: Built = []
    for size, chosen in tiles:
        for group in groups(n, (size, chosen)):
            program = lower(problem, Candidate(size, replace(chosen, column_group=group), tilings[size.rows]))
            emission, shape = emit(program, "sass", device.arch), launch(program)
            _, whole, short = groups_of(n, (size, chosen), group)
            forms = {"between" if short else "none idle": emission}
            if short:
                forms["last"] = numbered_anew(emission, whole, short)
            for name, one in forms.items():
                binary = compile_kernel(one, arch=device.arch, registers=program.registers, store=Store(Path(folder)),
                                        workers=1)  # fmt: skip
                labels = {**size._asdict(), "prefetch": chosen.prefetch, "walks": chosen.walks, "group": group,
                          "blocks": math.prod(shape.grid),
                          "with_columns": program.block_rows * ceil_div(n, size.cols * chosen.walks),
                          "registers": binary.registers}  # fmt: skip
                found.append((name, labels, Kernel(binary.cubin, program.name, shape, binary.code_bytes)))
    return found


def main() -> None:
    record("idle_blocks", timed([*wanted()], build), description=__doc__)


if __name__ == "__main__":
    main()
