"""Blocks of the same columns that are kept in step, tile beside tile, by the barrier of their cluster.

    python -m benchmarks.in_step [--out DIR]

needs an H200 or H100. Kernels wait longer for B where some SMs are later than others (``benchmarks.delays``). Here the
blocks of 2, 4 or 8 tiles, with the same columns of B and C, are a cluster, and meet a few times: each warp says that it
has come there, and waits some loads later for all others. Beside them stand the same tiles without clusters, in three
orders of blocks, and clusters that never meet. Forms take turns. Writes ``in_step.jsonl`` and prints a line per kernel.
"""

import struct
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.ablation import Code, each_tile
from benchmarks.checked import Kernel
from benchmarks.early import Built, CaseOf, timed
from benchmarks.kernels import SEED
from benchmarks.recorded import record
from lospmm.build import for_emitter
from lospmm.codegen.emission import Emission
from lospmm.codegen.sass import layer
from lospmm.codegen.sass.emit import tiles_of
from lospmm.codegen.sass.form import Opcode
from lospmm.codegen.sass.prologue import prologue
from lospmm.codegen.sass.scheduler import _cluster
from lospmm.device import DeviceSpec
from lospmm.ir import launch
from lospmm.lower import lower
from lospmm.model import Candidate, Problem, Schedule, TileSize
from lospmm.reorder import regroup
from lospmm.store import Store
from lospmm.toolchain import elf
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.elf_rewrite import rewrite
from lospmm_datasets.synthetic import uniform

#: Rows and columns of a tile, loads in flight, and sizes of clusters that all fit one wave.
Tiles = tuple[int, int, int, tuple[int, ...]]
CASES: tuple[CaseOf[Tiles], ...] = (
    ((768, 768, 4096), 0.98, ((96, 288, 56, (2, 4, 8)), (77, 320, 72, (2,)), (64, 416, 48, (2, 4)))),
    ((768, 3072, 4096), 0.98, ((96, 288, 56, (2, 4, 8)), (64, 416, 48, (2, 4)))),
    ((256, 2304, 3136), 0.98, ((16, 448, 72, (2, 4, 8)), (32, 224, 72, (2, 4, 8)))),
    ((512, 1024, 3136), 0.98, ((64, 224, 72, (2, 4, 8)),)),
    ((1024, 512, 3136), 0.98, ((128, 224, 72, (2, 4, 8)),)),
    ((768, 768, 4096), 0.9, ((39, 704, 16, (2, 4)), (43, 608, 24, (2,)), (48, 512, 40, (2,)))),
    ((256, 576, 12544), 0.9, ((43, 608, 24, (2,)), (32, 832, 24, (2, 4, 8)))),
)  # fmt: skip

#: How often the blocks of a cluster meet; loads between coming there and waiting.
MEETINGS = (0, 3, 15)
LOADS_BEHIND = 8

GROUPS = (0, 1, 2)

#: Of an attribute of a kernel: words follow; the size of its clusters.
WORDS, CLUSTER = 0x04, 0x3D


def meeting(tile: Code, *, times: int) -> Code:
    """After equal shares of its loads, so often whatever the tile."""
    loads = np.flatnonzero(tile["op"] == Opcode.LDG)
    pieces = []
    for number in range(1, times + 1):
        at = number * len(loads) // (times + 1)
        for place, op in ((at, Opcode.CLUSTER_ARRIVE), (at + LOADS_BEHIND, Opcode.CLUSTER_WAIT)):
            pieces.append((int(loads[place]), _cluster((op,))))
    if not pieces:
        return tile
    before = np.array([at for at, _ in pieces], np.intp) - 1
    changed = tile.copy()
    changed["reuse"][before] = 0  # nothing is kept past what stands between
    found: Code = layer.inserted(changed, pieces)
    return found


def in_clusters(cubin: bytes, kernel: str, size: int) -> bytes:
    """``cubin``, so that ``size`` blocks along y are a cluster, as ptxas says it of ``.reqnctapercluster``."""
    name = f".nv.info.{kernel}"
    info = next(section.content for section in elf.sections(cubin) if section.name == name)
    return rewrite(cubin, {name: info + struct.pack("<BBHIII", WORDS, CLUSTER, 12, 1, size, 1)})


def build(case: CaseOf[Tiles], device: DeviceSpec, folder: str) -> Built:
    (m, k, n), sparsity, tiles = case
    problem = for_emitter(Problem(uniform(m, k, sparsity, seed=SEED), n, device), "sass")
    store = Store(Path(folder))
    found: Built = []
    for rows, cols, prefetch, clusters in tiles:
        tiling = regroup(problem.matrix, [rows])[rows]
        forms = [(f"alone, groups of {group or 'all'}", group, 1, 0) for group in GROUPS]
        forms += [(f"{size} together, {times} times", 1, size, times) for size in clusters for times in MEETINGS]
        for name, group, size, times in forms:
            program = lower(problem, Candidate(TileSize(rows, cols), Schedule(prefetch, None, group), tiling))
            assert launch(program).grid[1] % size == 0, f"{case}: {rows} rows, clusters of {size}"
            code = tiles_of(program, device.arch)
            code = each_tile(code, partial(meeting, times=times)) if size > 1 else code
            emission = Emission(language="sass", entry=program.name, source="",
                                units=(prologue(program, device.arch),), machine=code)  # fmt: skip
            binary = compile_kernel(emission, arch=device.arch, registers=program.registers, store=store, workers=1)
            cubin = in_clusters(binary.cubin, program.name, size) if size > 1 else binary.cubin
            labels = {"rows": rows, "cols": cols, "prefetch": prefetch, "blocks": int(np.prod(launch(program).grid))}
            found.append((name, labels, Kernel(cubin, program.name, launch(program), binary.code_bytes)))
    return found


def main() -> None:
    record("in_step", timed(CASES, build), description=__doc__)


if __name__ == "__main__":
    main()
