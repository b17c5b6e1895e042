"""How many elements of B in flight suit a kernel, in finer steps than the space has.

    python -m benchmarks.in_flight [--out DIR]

needs an H200 or H100. Blocks that ask for the same rows of B at the same time get them sooner (``benchmarks.delays``):
loads far ahead of one block may be too early for the others. Of the kernels of ``benchmarks.delays`` for A of many
rows, each number of loads in flight that its registers allow is timed, in turns. Writes ``in_flight.jsonl`` and prints
a line per kernel.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks import delays
from benchmarks.checked import Kernel
from benchmarks.delays import Tile
from benchmarks.early import Built, CaseOf, timed
from benchmarks.kernels import SEED
from benchmarks.recorded import record
from lospmm.build import for_emitter
from lospmm.codegen import emit
from lospmm.device import DeviceSpec
from lospmm.ir import launch
from lospmm.lower import lower
from lospmm.model import Candidate, Problem, ceil_div
from lospmm.reorder import regroup
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm_datasets.synthetic import uniform

ROWS = 256
IN_FLIGHT = (8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 64, 72, 88, 104, 144)

REGISTERS, STEP, QUARTERS = 65_536, 8, 128


def wanted() -> Iterator[CaseOf[Tile]]:
    yield from (case for case in delays.wanted() if case[0][0] >= ROWS)


def build(case: CaseOf[Tile], device: DeviceSpec, folder: str) -> Built:
    (m, k, n), sparsity, tiles = case
    problem = for_emitter(Problem(uniform(m, k, sparsity, seed=SEED), n, device), "sass")
    found: Built = []
    for tile, schedule in tiles:
        tiling = regroup(problem.matrix, [tile.rows])[tile.rows]
        threads = ceil_div(tile.cols, QUARTERS) * QUARTERS  # each quarter of an SM has registers for its own warps
        for prefetch in sorted({*IN_FLIGHT, schedule.prefetch}):
            program = lower(problem, Candidate(tile, replace(schedule, prefetch=prefetch), tiling))
            if ceil_div(program.registers, STEP) * STEP * threads > REGISTERS or program.registers > 255:
                break
            emission, shape = emit(program, "sass", device.arch), launch(program)
            binary = compile_kernel(emission, arch=device.arch, registers=program.registers, store=Store(Path(folder)),
                                    workers=1)  # fmt: skip
            if ceil_div(binary.registers, STEP) * STEP * threads > REGISTERS:
                break
            labels = {**tile._asdict(), "walks": schedule.walks, "was": schedule.prefetch}
            found.append((f"{prefetch}", labels, Kernel(binary.cubin, program.name, shape, binary.code_bytes)))
    return found


def main() -> None:
    record("in_flight", timed([*wanted()], build), description=__doc__)


if __name__ == "__main__":
    main()
