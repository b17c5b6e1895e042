"""The example of docs/flow.md, step by step: eight rows, two tiles, and what is made of the first."""

from collections import Counter
from collections.abc import Sequence

from lospmm.codegen import emit, source_of
from lospmm.codegen.lower import lower
from lospmm.matrix.csr import from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.candidates import TileSize, UnrolledPlan
from lospmm.space.reorder import regroup
from lospmm.stages import Stages
from lospmm.tuning.unrolled import explore_problem
from tests.fixtures.interpret import Fma, LoadRow, instructions
from tests.golden.renew import EXAMPLE, SCHEDULE

TILE = TileSize(4, 32)
PROBLEM = Problem(from_dense(EXAMPLE), 96, DEVICES["h200"])
CANDIDATE = UnrolledPlan(TILE, SCHEDULE, regroup(PROBLEM.matrix, [TILE.rows])[TILE.rows])
PROGRAM = lower(PROBLEM, CANDIDATE)


def fenced(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


def matrix() -> str:
    lines = ["row " + "".join(f"{column:>7}" for column in range(EXAMPLE.shape[1]))]
    for number in CANDIDATE.tiling.tiles[0]:
        cells = "".join(f"{value:7g}" if value else "      ." for value in EXAMPLE[number])
        lines.append(f"{number:>3} {cells}")
    return fenced("\n".join(lines))


def space() -> str:
    found = explore_problem(PROBLEM, Stages())
    lines = [f"tile sizes   {found.size}"]
    for name, count in Counter(verdict.constraint for verdict in found.verdicts).items():
        lines.append(f"removed      {count} by {name}{' (limit relaxed)' if name in found.relaxed else ''}")
    sizes = (candidate.tile for candidate in found.survivors)
    return fenced("\n".join([*lines, "left         " + ", ".join(f"{size.rows} x {size.cols}" for size in sizes)]))


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
    return _statements("ptx", "ptx", ("ld.global", "fma", "st.global"))


def tile_listing() -> list[str]:
    """The lines of tile 0 in kernel.sass, its rows first."""
    emission = emit(PROGRAM, "sass", PROBLEM.device.arch)
    _, tile, _ = source_of(PROGRAM, emission, PROBLEM.device.arch).split("\n\n")
    return tile.splitlines()


def sass() -> str:
    return fenced("\n".join(line for line in tile_listing() if not line.endswith(" NOP ;")))


def cuda() -> str:
    return _statements("cuda", "c++", ("__ldcs", "__fmaf_rn", "__stcs"))


def _statements(emitter: str, language: str, operations: Sequence[str]) -> str:
    """Return the first load, multiply-add and store of tile 0."""
    lines = emit(PROGRAM, emitter, PROBLEM.device.arch).source.partition("// rows")[2].splitlines()
    found = (next(line.strip() for line in lines if operation in line) for operation in operations)
    return "\n".join([f"```{language}", *found, "```", ""])


#: The regions of docs/flow.md.
REGIONS = {f"flow {step.__name__}": step for step in (matrix, space, ir, sass, ptx, cuda)}
