"""The example of docs/flow.md, step by step: eight rows, two tiles, and what is made of the first."""

from collections.abc import Sequence

import numpy as np

from lospmm.codegen import emit, source_of
from lospmm.codegen.interpret import interpret
from lospmm.codegen.ir import Fma, LoadRow, instructions
from lospmm.codegen.lower import lower
from lospmm.cpu import execute
from lospmm.cpu.geometry import geometry_of
from lospmm.matrix.csr import from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.candidates import TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order, regroup
from lospmm.stages import Stages
from lospmm.tuning.unrolled import explore_problem
from tests.golden.renew import EXAMPLE, SCHEDULE

TILE = TileSize(4, 32)
PROBLEM = Problem(from_dense(EXAMPLE), 96, DEVICES["h200"])
CANDIDATE = UnrolledPlan(TILE, SCHEDULE, regroup(PROBLEM.matrix, [TILE.rows])[TILE.rows])
PROGRAM = lower(PROBLEM, CANDIDATE)


def fenced(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


def matrix() -> str:
    lines = ["row " + "".join(f"{column:>7}" for column in range(EXAMPLE.shape[1]))]
    for number, row in enumerate(EXAMPLE):
        cells = "".join(f"{value:7g}" if value else "      ." for value in row)
        lines.append(f"{number:>3} {cells}")
    return fenced("\n".join(lines))


def space() -> str:
    found = explore_problem(PROBLEM, Stages())
    lines = [f"{found.size} tile sizes"]
    for name in dict.fromkeys(verdict.constraint for verdict in found.verdicts):
        removed = [verdict.tile for verdict in found.verdicts if verdict.constraint == name]
        lines.append(f"{name}{' (limit moved)' if name in found.relaxed else ''} removes {len(removed)}:")
        lines += _by_width(removed)
    return fenced("\n".join([*lines, "left:", *_by_width([candidate.tile for candidate in found.survivors])]))


def _by_width(sizes: Sequence[TileSize]) -> list[str]:
    return [
        f"  N1 = {cols}: M1 = {', '.join(str(size.rows) for size in sizes if size.cols == cols)}"
        for cols in sorted({size.cols for size in sizes})
    ]


def tiles() -> str:
    lines = ["order     tile  rows         nnz  nnc"]
    for order, tiling in (("natural", natural_order(PROBLEM.matrix, TILE.rows)), ("regrouped", CANDIDATE.tiling)):
        for number, tile in enumerate(tiling.tiles):
            chosen = ", ".join(map(str, tile.rows))
            lines.append(f"{order:9} {number:4}  {chosen:11} {tile.nnz:4} {tile.nnc:4}")
    return fenced("\n".join(lines))


def ir() -> str:
    lines = []
    for instruction in instructions(PROGRAM.tiles[0]):
        match instruction:
            case LoadRow(buffer, k):
                lines.append(f"Load   x{buffer} <- B[{k}]")
            case Fma(accumulator, buffer, weight):
                lines.append(f"Fma    a{accumulator} <- a{accumulator} + {weight:g} * x{buffer}")
            case store:
                lines.append(f"Store  C[{store.row}] <- a{store.accumulator}")
    return fenced("\n".join(lines))


def ptx() -> str:
    """Tile 0, and the kernel behind the tiles."""
    return "```ptx\n" + _without_tile_1(emit(PROGRAM, "ptx", PROBLEM.device.arch).source, "\n.visible .entry") + "```\n"


def tile_listing() -> list[str]:
    """The lines of tile 0 in kernel.sass, its rows first."""
    emission = emit(PROGRAM, "sass", PROBLEM.device.arch)
    _, tile, _ = source_of(PROGRAM, emission, PROBLEM.device.arch).split("\n\n")
    return tile.splitlines()


def sass() -> str:
    return fenced("\n".join(line for line in tile_listing() if not line.endswith(" NOP ;")))


def cuda() -> str:
    source = emit(PROGRAM, "cuda", PROBLEM.device.arch).source
    return "```c++\n" + _without_tile_1(source[source.index("// rows") :], '\nextern "C" __global__') + "```\n"


def _without_tile_1(source: str, entry: str) -> str:
    second = source.index("\n// rows", source.index("// rows") + 1)
    return source[:second] + "\n// ... tile_1 ...\n" + source[source.index(entry) :]


def result() -> str:
    """C for a B whose row k is all k + 1: the IR in NumPy, PTX and machine code on the CPU, and SciPy."""
    b = np.repeat(np.arange(1, EXAMPLE.shape[1] + 1, dtype=np.float32)[:, np.newaxis], PROBLEM.n, axis=1)
    geometry = geometry_of(PROGRAM, n=PROBLEM.n, cols=TILE.cols)
    emitted = [emit(PROGRAM, language, PROBLEM.device.arch) for language in ("ptx", "sass")]
    by_text = [execute(emission, geometry, np.arange(PROBLEM.n), b) for emission in emitted]
    results = (interpret(PROGRAM, b), *by_text, PROBLEM.matrix.to_scipy() @ b)
    lines = ["row     IR    PTX   SASS  A x B"]
    lines += [f"{row:3} " + " ".join(f"{c[row, 0]:6g}" for c in results) for row in range(len(EXAMPLE))]
    return fenced("\n".join(lines))


#: The regions of docs/flow.md.
REGIONS = {f"flow {step.__name__}": step for step in (matrix, space, tiles, ir, sass, ptx, cuda, result)}
