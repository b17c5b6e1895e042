"""Rings whose rows of B are copied to several SMs at once, beside kernels with B in registers.

    python -m benchmarks.multicast [--out DIR]

needs an H200 or H100. At 98 % zeros kernels wait for B from the L2 cache, which every tile reads anew. The blocks of a
cluster, with a tile each, can share what they copy (``benchmarks.ring_kernel``): 2, 4 or 8 of them, and in ``pairs``
with the next columns, so that two SMs next to each other walk the same code. Of each shape and way the tile size is
timed that a count of bytes puts first, in rings of few stages and of many, whole and with nothing but its copies; and
of the first ring its code alone. "Registers" is the tile that an earlier search chose, timed twice. Writes
``multicast.jsonl`` and prints a line per kernel.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.checked import Kernel
from benchmarks.early import Built, CaseOf, cases, timed
from benchmarks.kernels import SEED
from benchmarks.recorded import Row, record
from benchmarks.ring_kernel import DATA, NAME, Ring
from benchmarks.ring_kernel import build as ring_of
from lospmm.build import for_emitter
from lospmm.codegen import emit
from lospmm.device import DeviceSpec
from lospmm.early import may_store_early
from lospmm.ir import FLOAT_BYTES, launch
from lospmm.lower import lower
from lospmm.model import Candidate, Problem, Schedule, TileSize, ceil_div
from lospmm.reorder import regroup
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm_datasets.synthetic import uniform

SPARSITIES = (0.98, 0.9)
SHAPES = ((768, 768, 4096), (3072, 768, 4096))

STAGE_ROWS, PREFETCH = 16, 12
SHARED_BYTES, REGISTERS, KEPT = 227 * 1024, 65_536, 10

#: Of a ring, beside as many as there is room for.
STAGES = (3, 6)


class Way(NamedTuple):
    """Blocks that share copies, whether each has a neighbour with the same tile, clusters of these that run at a time,
    and the bytes of code that an SM gets in a cycle (docs/decisions/0008)."""

    multicast: int
    pairs: bool
    clusters: int
    code_bytes: float


WAYS = (
    Way(1, pairs=False, clusters=132, code_bytes=2.5),
    Way(2, pairs=False, clusters=66, code_bytes=2.0),
    Way(2, pairs=True, clusters=30, code_bytes=2.5),
    Way(4, pairs=False, clusters=30, code_bytes=2.0),
    Way(4, pairs=True, clusters=15, code_bytes=2.5),
    Way(8, pairs=False, clusters=15, code_bytes=2.0),
)

B_BYTES = 46  # a cycle and SM, from the L2 cache to all of them at a time
MULTIPLY_ADDS = 4  # of a warp, a cycle

Wanted = TileSize | Ring


def rings(gemm: tuple[int, int, int], sparsity: float) -> Iterator[Ring]:
    """Of each way the tile size with the least of what a block waits for longest, in all rings."""
    m = gemm[0]
    for way in WAYS:
        found: list[tuple[float, Ring]] = []
        for cols in range(128, 1024 - 32, 32):
            threads = ceil_div(cols + 32, 128) * 128  # each quarter of an SM has registers for its own warps
            most = min(255, REGISTERS // threads // 8 * 8) - PREFETCH - KEPT
            stages = (SHARED_BYTES - DATA) // (STAGE_ROWS * cols * FLOAT_BYTES)
            for count in {ceil_div(m, rows) for rows in range(16, most + 1)}:
                ring = Ring(ceil_div(m, count), cols, STAGE_ROWS, stages, PREFETCH, 2, way.multicast, pairs=way.pairs)
                found.append((_cycles(ring, way, gemm, sparsity), ring))
        _, ring = min(found, key=lambda one: one[0])
        for stages in (*(few for few in STAGES if few < ring.stages), ring.stages):
            yield replace(ring, stages=stages)
            yield replace(ring, stages=stages, first_out=False)


def _cycles(ring: Ring, way: Way, gemm: tuple[int, int, int], sparsity: float) -> float:
    m, k, n = gemm
    across = ceil_div(ceil_div(n, ring.cols), ring.width)
    waves = ceil_div(ceil_div(ceil_div(m, ring.rows), way.multicast) * across, way.clusters)
    entries, read = ring.rows * k * (1 - sparsity), k * (1 - sparsity**ring.rows)
    code = 16 * (entries + read + ring.rows) / way.code_bytes
    issued = (entries + read) * ring.cols / 32 / MULTIPLY_ADDS
    return waves * (max(code, issued, FLOAT_BYTES * k * ring.cols / way.multicast / B_BYTES) + 0.2 * (code + issued))


def wanted() -> Iterator[CaseOf[tuple[TileSize, Schedule]]]:
    yield from (case for case in cases(SPARSITIES) if case[0] in SHAPES)


def build(case: CaseOf[tuple[TileSize, Schedule]], device: DeviceSpec, folder: str) -> Built:
    """The kernel that was chosen before, rings, and of the first of each way parts."""
    gemm, sparsity, chosen = case
    m, k, n = gemm
    store = Store(Path(folder))
    problem = for_emitter(Problem(uniform(m, k, sparsity, seed=SEED), n, device), "sass")
    found: Built = []
    for tile, schedule in chosen:
        found.append(("registers", *plain(problem, tile, schedule, store)))
    for ring in rings(gemm, sparsity):
        name = f"multicast {ring.multicast}{', pairs' if ring.pairs else ''}"
        is_first = ring.first_out and ring.stages == STAGES[0]
        for without in ("", "multiply-adds", "copies") if is_first else ("", "multiply-adds"):
            kernel = ring_of(problem, replace(ring, without=without), store)
            size = _labels(TileSize(ring.rows, ring.cols), math.prod(kernel.launch.grid))
            axes = {"stages": ring.stages, "first_out": ring.first_out, "without": without, "chosen": False}
            found.append((name, size | axes, Kernel(kernel.cubin, NAME, kernel.launch, kernel.code_bytes)))
    return found


def plain(problem: Problem, tile: TileSize, schedule: Schedule, store: Store) -> tuple[Row, Kernel]:
    """The kernel of that tile with B in registers, and rows stored early where they may be."""
    arch = problem.device.arch
    early = replace(schedule, stores_early=may_store_early(problem, schedule))
    program = lower(problem, Candidate(tile, early, regroup(problem.matrix, [tile.rows])[tile.rows]))
    emission = emit(program, "sass", arch)
    binary = compile_kernel(emission, arch=arch, registers=program.registers, store=store, workers=1)
    shape = launch(program)
    return _labels(tile, math.prod(shape.grid)), Kernel(binary.cubin, program.name, shape, binary.code_bytes)


def _labels(tile: TileSize, blocks: int) -> Row:
    return {**tile._asdict(), "blocks": blocks}


def main() -> None:
    record("multicast", timed([*wanted()], build), description=__doc__)


if __name__ == "__main__":
    main()
