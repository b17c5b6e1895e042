"""Blocks that compute several tiles, one after another: the stores of one go on while the next is computed.

    python -m benchmarks.chains [--out DIR]

needs an H200 or H100. Kernels whose blocks come in waves are timed as they are, and with a tile of each wave to a block
(``Schedule.tiles_per_block``), twice in turns. Writes ``chains.jsonl`` and prints a line per kernel.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checked import Kernel, Operands
from benchmarks.recorded import record
from lospmm.build import for_emitter
from lospmm.codegen import emit
from lospmm.dtype import FLOAT32
from lospmm.gpu.driver import open_driver
from lospmm.ir import launch
from lospmm.lower import lower
from lospmm.model import Candidate, Problem, Schedule, TileSize
from lospmm.reorder import regroup
from lospmm.runtime.detect import detect_device
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm_datasets.synthetic import uniform

#: (m, k, n, sparsity) and its tile sizes, of two waves; of the second one of each problem there are a few blocks more.
PROBLEMS = {
    (3072, 768, 4096, 0.9): (TileSize(96, 512), TileSize(94, 512)),
    (768, 768, 16384, 0.9): (TileSize(96, 512), TileSize(97, 512)),
    (3072, 768, 4096, 0.98): (TileSize(96, 512),),
}
SCHEDULES = (Schedule(16, None, 2), Schedule(16, None, 0), Schedule(16, None, 2, 128))
TURNS = 2


def build(problem: Problem, candidate: Candidate, store: Store) -> Kernel:
    program = lower(problem, candidate)
    arch = problem.device.arch
    binary = compile_kernel(emit(program, "sass", arch), arch=arch, registers=program.registers, store=store, workers=1)
    return Kernel(binary.cubin, program.name, launch(program), binary.code_bytes)


def records() -> Iterator[dict[str, Any]]:
    driver, device = open_driver(), detect_device()
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        for (m, k, n, sparsity), tiles in PROBLEMS.items():
            problem = for_emitter(Problem(uniform(m, k, sparsity, seed=0), n, device), "sass")
            operands = Operands(driver, problem.matrix, n, FLOAT32)
            tilings = regroup(problem.matrix, sorted({tile.rows for tile in tiles}))
            for tile in tiles:
                for schedule in SCHEDULES:
                    alone = Candidate(tile, schedule, tilings[tile.rows])
                    both = [alone, replace(alone, schedule=replace(schedule, tiles_per_block=2))]
                    kernels = [build(problem, one, store) for one in both]
                    for turn in range(TURNS):
                        for one, kernel in zip(both, kernels, strict=True):
                            yield {"device": device.name, "m": m, "k": k, "n": n, "sparsity": sparsity,
                                   **tile._asdict(), **asdict(one.schedule), "turn": turn,
                                   "blocks": int(np.prod(kernel.launch.grid)), **operands.time(kernel)}  # fmt: skip
            operands.close()
    driver.close()


def main() -> None:
    record("chains", records(), description=__doc__)


if __name__ == "__main__":
    main()
