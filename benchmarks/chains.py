"""Blocks that compute several tiles, one after another: the stores of one go on while the next is computed.

    python -m benchmarks.chains [--out DIR]

needs an H200 or H100. Kernels of two blocks to an SM are timed as they are, and with the code of each two tiles behind
one another, so that a block computes both: one block to an SM. The loads that the second tile begins with come before
the stores of the first. Writes ``chains.jsonl`` and prints a line per kernel.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.checked import Kernel, Operands
from benchmarks.recorded import Row, record
from lospmm.build import for_emitter
from lospmm.codegen import emit
from lospmm.codegen.sass import scheduler
from lospmm.codegen.sass.form import Opcode
from lospmm.codegen.sass.machine import MachineCode
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

#: (m, k, n, sparsity); heights that divide m, so that all tiles have the same registers.
PROBLEMS = ((3072, 768, 4096, 0.9), (768, 768, 16384, 0.9))
TILES = (TileSize(96, 512), TileSize(64, 736), TileSize(48, 832))
SCHEDULES = (Schedule(16, None, 2), Schedule(16, None, 0), Schedule(16, None, 2, 128))

_STORED = 1 << scheduler.ADDRESS_SCOREBOARD

Form = NDArray[np.void]


def chained(code: MachineCode) -> MachineCode:
    """Tiles 2 i and 2 i + 1 as one; of an odd number the last is alone."""
    ends = [*code.starts[1:], len(code.form)]
    tiles = [_without_end(code.form[start:end]) for start, end in zip(code.starts, ends, strict=True)]
    pieces, starts, at = [], [], 0
    for first in range(0, len(tiles), 2):
        body = tiles[first] if first + 1 == len(tiles) else _one_after_another(tiles[first], tiles[first + 1])
        body = np.concatenate((body, scheduler._leave()))
        body = np.concatenate((body, scheduler.padding(len(body))))
        pieces.append(body)
        starts.append(at)
        at += len(body)
    return replace(code, form=np.concatenate(pieces), starts=np.array(starts), dispatch=tuple(range(len(starts))))


def _without_end(tile: Form) -> Form:
    return tile[: int(np.argmax(tile["op"] == Opcode.EXIT))].copy()


def _one_after_another(first: Form, second: Form) -> Form:
    """The second tile's accumulators are those of the first: they wait until its stores have read them."""
    end = int(np.flatnonzero(first["op"] == Opcode.FFMA_IMM)[-1]) + 1
    begin = int(np.flatnonzero(second["op"] == Opcode.FFMA_IMM)[0])
    stores = first[end:]
    places = np.flatnonzero(stores["op"] == Opcode.STG)
    stores["read_barrier"][places] = scheduler.ADDRESS_SCOREBOARD
    # A scoreboard counts to 63, and tells one cycle late.
    pauses = places[scheduler.ADDRESSES_OUTSTANDING // 2 :: scheduler.ADDRESSES_OUTSTANDING // 2]
    stores["wait"][pauses] |= _STORED
    stores["stall"][pauses - 1] = np.maximum(stores["stall"][pauses - 1], 2)
    stores["stall"][-1] = max(int(stores["stall"][-1]), 2)
    rest = second[begin:]
    rest["wait"][0] |= _STORED
    loads = second[:begin]
    loads["stall"][-1] = max(int(loads["stall"][-1]), 2)
    return np.concatenate((first[:end], loads, stores, rest))


def build(problem: Problem, tile: TileSize, schedule: Schedule, store: Store, *, chain: bool) -> Kernel:
    program = lower(problem, Candidate(tile, schedule, regroup(problem.matrix, [tile.rows])[tile.rows]))
    emission, arch = emit(program, "sass", problem.device.arch), problem.device.arch
    shape = launch(program)
    if chain:
        assert emission.machine is not None
        emission = replace(emission, machine=chained(emission.machine))
        assert emission.machine is not None
        shape = replace(shape, grid=(shape.grid[0], len(emission.machine.starts), shape.grid[2]))
    binary = compile_kernel(emission, arch=arch, registers=program.registers, store=store, workers=1)
    return Kernel(binary.cubin, program.name, shape, binary.code_bytes)


def records() -> Iterator[dict[str, Any]]:
    driver, device = open_driver(), detect_device()
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        for m, k, n, sparsity in PROBLEMS:
            problem = for_emitter(Problem(uniform(m, k, sparsity, seed=0), n, device), "sass")
            operands = Operands(driver, problem.matrix, n, FLOAT32)
            for tile in TILES:
                for schedule in SCHEDULES:
                    for chain in (False, True):
                        kernel = build(problem, tile, schedule, store, chain=chain)
                        blocks = int(np.prod(kernel.launch.grid))
                        yield {"device": device.name, "m": m, "k": k, "n": n, "sparsity": sparsity, **tile._asdict(),
                               **asdict(schedule), "tiles_per_block": 1 + chain, "blocks": blocks,
                               **operands.time(kernel)}  # fmt: skip
            operands.close()
    driver.close()


def main() -> None:
    record("chains", records(), _shown, description=__doc__)


def _shown(row: Row) -> str:
    return " ".join(str(value) for name, value in row.items() if name != "device")


if __name__ == "__main__":
    main()
