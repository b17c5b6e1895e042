"""The order in which a tile loads rows of B, over the 41 shapes of section 7.1.

    python -m benchmarks.early [--out DIR]

needs an H200 or H100. Of each shape, at the sparsities of SPARSITIES, the tiles that ``benchmarks.families`` and
``benchmarks.kernels`` chose before, and others that the rank model puts first, are timed with columns as they are
numbered ("plain").
One tile of each shape is timed with columns in an order of each tile's own, in which rows are finished one after
another, with each tile beginning with other columns ("turned"), and with a matrix of the same size that uses every row
of B once ("diagonal": its errors mean nothing). Forms take turns. Kernels are built in processes ahead of the GPU.
Writes ``early.jsonl`` and prints a line per kernel.
"""

import ast
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.checked import Kernel, Operands
from benchmarks.families_unrolled import shortlist
from benchmarks.kernels import ROOT, SEED, SHAPES_FILE
from benchmarks.recorded import Row, record
from lospmm.build import for_emitter
from lospmm.codegen import emit
from lospmm.device import DeviceSpec
from lospmm.dtype import FLOAT32
from lospmm.gpu.driver import open_driver
from lospmm.gpu.timing import Effort
from lospmm.ir import WINDOW_BYTES, KernelProgram, TileProgram, launch
from lospmm.lower import lower
from lospmm.matrix import from_coo
from lospmm.model import Candidate, Problem, Schedule, TileSize
from lospmm.reorder import natural_order, regroup
from lospmm.runtime.detect import detect_device
from lospmm.schedule import tile_programs
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm_datasets.shapes import read_shapes
from lospmm_datasets.synthetic import uniform

SPARSITIES = (0.98, 0.95)
TURNS = 2
EFFORT = Effort(replays=9, warm_micros=5_000.0)

#: Beside the tiles that were chosen before, so many that the rank model puts first, at the first sparsity, once.
OTHERS = 10

Tile = TypeVar("Tile")

#: One shape, its sparsity, and what of it is to be timed.
CaseOf = tuple[tuple[int, int, int], float, tuple[Tile, ...]]
Case = CaseOf[tuple[TileSize, Schedule]]

AXES = ("prefetch", "fmas_per_load", "column_group", "lockstep", "split_k")


def cases(sparsities: Sequence[float] = SPARSITIES) -> list[Case]:
    """Every shape, with the tiles of earlier searches."""
    found: dict[tuple[tuple[int, int, int], float], list[tuple[TileSize, Schedule]]] = {}
    results = ROOT / "benchmarks" / "results"
    for line in (results / "families.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["set"] == "shapes" and row["dtype"] == "tf32":
            _add(found, row, round(row["sparsity"], 2), axes_of(row["families"]["unrolled"]["plan"]))
    for line in (results / "kernels.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["set"] == "shapes" and row.get("tile"):  # the kernel of another family has none
            _add(found, row, row["drawn_sparsity"], row["tile"])
    gemms = [shape.gemm for network in read_shapes(SHAPES_FILE).networks for shape in network.shapes]
    return [(gemm, sparsity, tuple(found[gemm, sparsity])) for sparsity in sparsities for gemm in gemms]


def axes_of(plan: str) -> Row:
    """The axes of a plan of the unrolled family, as lines of families.jsonl have it: a manifest's tile, or a tile size
    and a schedule."""
    if plan.startswith("{"):
        tile: Row = ast.literal_eval(plan)
        return tile
    return {name: ast.literal_eval(value) for name, value in re.findall(r"(\w+)=(\w+)", plan)}


def _add(found: dict[Any, list[Any]], row: Row, sparsity: float, tile: Row) -> None:
    chosen = found.setdefault(((row["m"], row["k"], row["n"]), sparsity), [])
    one = TileSize(tile["rows"], tile["cols"]), Schedule(**{axis: tile[axis] for axis in AXES})
    if one not in chosen:
        chosen.append(one)


def forms(problem: Problem, candidate: Candidate, *, is_dissected: bool) -> Iterator[tuple[str, KernelProgram]]:
    """Each with its name."""
    plain = lower(problem, candidate)
    yield "plain", plain
    if is_dissected and candidate.schedule.split_k == 1:
        tiles = candidate.tiling.tiles
        ordered = [_ordered(problem, candidate, number) for number in range(len(tiles))]
        yield "order", replace(plain, tiles=(*ordered, *plain.tiles[len(tiles) :]))
        yield "turned", turned(problem, candidate, plain)
        yield "diagonal", diagonal(problem, candidate)


def _ordered(problem: Problem, candidate: Candidate, number: int) -> TileProgram:
    """The tile of that number, its columns in an order in which rows are finished one after another: that with the
    fewest columns that are still missing, again and again."""
    matrix, rows = problem.matrix, candidate.tiling.tiles[number].rows
    columns_of = [matrix.indices[matrix.indptr[row] : matrix.indptr[row + 1]] for row in rows]
    touches = np.zeros((len(rows), matrix.k), np.bool_)
    for at, columns in enumerate(columns_of):
        touches[at, columns] = True
    missing, is_left = touches.sum(axis=1), np.ones(matrix.k, np.bool_)
    order = []
    for _ in rows:
        row = int(np.argmin(missing))
        missing[row] = np.iinfo(np.int64).max // 2
        new = columns_of[row][is_left[columns_of[row]]]
        is_left[new] = False
        missing -= touches[:, new].sum(axis=1)
        order.append(new)
    found = np.concatenate([*order, np.flatnonzero(is_left)]).astype(np.int64)
    if problem.matrix.k * problem.n * FLOAT32.element_bytes > 3 * WINDOW_BYTES // 2:
        found = np.sort(found)  # a thread reaches two windows of B in any order
    (program,) = tile_programs(matrix, rows, candidate.schedule, order=found)
    return program


def turned(problem: Problem, candidate: Candidate, plain: KernelProgram) -> KernelProgram:
    """Each tile begins with other columns, round to those before."""
    k, tiles = problem.matrix.k, candidate.tiling.tiles
    turned = [
        tile_programs(
            problem.matrix, tile.rows, candidate.schedule, order=np.roll(np.arange(k), -(k * at // len(tiles)))
        )
        for at, tile in enumerate(tiles)
    ]
    return replace(plain, tiles=(*(program for (program,) in turned), *plain.tiles[len(tiles) :]))


def diagonal(problem: Problem, candidate: Candidate) -> KernelProgram:
    """Of a matrix as large that uses each row of B in one tile, and writes all of C: what the traffic itself takes."""
    m, k = problem.matrix.m, problem.matrix.k
    count = max(m, k)
    at = np.arange(count)
    matrix = from_coo((m, k), at * m // count, at * k // count, np.ones(count, np.float32))
    tile = candidate.tile
    return lower(replace(problem, matrix=matrix), replace(candidate, tiling=natural_order(matrix, tile.rows)))


Built = list[tuple[str, Row, Kernel]]


def build(case: Case, device: DeviceSpec, folder: str) -> Built:
    """All kernels of a shape. Parts that mean nothing by themselves are of the first tile alone."""
    (m, k, n), sparsity, tiles = case
    problem = for_emitter(Problem(uniform(m, k, sparsity, seed=SEED), n, device), "sass")
    tilings = regroup(problem.matrix, sorted({tile.rows for tile, _ in tiles}))
    chosen = [Candidate(tile, schedule, tilings[tile.rows]) for tile, schedule in tiles]
    others = shortlist(problem, OTHERS) if sparsity == SPARSITIES[0] else []
    found: Built = []
    for number, candidate in enumerate([*chosen, *others]):
        is_dissected = number == 0 and sparsity == SPARSITIES[0]
        for name, program in forms(problem, candidate, is_dissected=is_dissected):
            binary = compile_kernel(emit(program, "sass", device.arch), arch=device.arch, registers=program.registers,
                                    store=Store(Path(folder)), workers=1)  # fmt: skip
            axes = {axis: getattr(candidate.schedule, axis) for axis in AXES}
            labels = {**candidate.tile._asdict(), **axes, "blocks": math.prod(launch(program).grid)}
            labels["chosen"] = number < len(chosen)
            found.append((name, labels, Kernel(binary.cubin, program.name, launch(program), binary.code_bytes)))
    return found


def timed(
    wanted: Sequence[CaseOf[Tile]],
    build: Callable[[CaseOf[Tile], DeviceSpec, str], Built],
    extra: Callable[[str], Sequence[np.generic]] = lambda _: (),
) -> Iterator[Row]:
    """What each kernel takes in every turn; those that are labelled as not ``chosen`` in the first alone. ``extra`` is
    what a form's kernels are given beside B and C."""
    device = detect_device()
    workers = max(1, (os.cpu_count() or 2) - 2)
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        built = [pool.submit(build, case, device, folder) for case in wanted]
        driver = open_driver()
        for ((m, k, n), sparsity, _), kernels in zip(wanted, built, strict=True):
            operands = Operands(driver, uniform(m, k, sparsity, seed=SEED), n, FLOAT32)
            for turn in range(TURNS):
                for name, labels, kernel in kernels.result():
                    if turn and not labels.get("chosen", True):
                        continue
                    yield {"device": device.name, "m": m, "k": k, "n": n, "sparsity": sparsity, "form": name, **labels,
                           "code_bytes": kernel.code_bytes, "turn": turn,
                           **operands.time(kernel, extra(name), effort=EFFORT)}  # fmt: skip
            operands.close()
        driver.close()


def main() -> None:
    record("early", timed(cases(), build), description=__doc__)


if __name__ == "__main__":
    main()
