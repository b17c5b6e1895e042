"""What each part of a kernel costs, and each decision of its schedule: the same tiles with one thing changed.

    python -m benchmarks.ablation [--out DIR]

needs an NVIDIA GPU with machine code of our own. For each problem one tile size is taken, and timed whole; without its
loads, its multiply-adds or its stores (such kernels compute nothing of use, and are not checked); with loads and stores
that stay in the caches; for each group of columns; and for barriers at several distances. B comes from memory, and once
more from the L2 cache. Writes ``ablation.jsonl`` and prints a line per variant.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Row, record
from lospmm.codegen.ir import launch
from lospmm.codegen.lower import lower
from lospmm.codegen.sass.addresses import ADDRESS_SCOREBOARD
from lospmm.codegen.sass.emit import without_fetch
from lospmm.codegen.sass.form import Opcode, blank
from lospmm.codegen.sass.machine import LINE_INSTRUCTIONS, MachineCode
from lospmm.gpu.detect import detect_device
from lospmm.gpu.driver import open_driver
from lospmm.gpu.protocol import Driver
from lospmm.gpu.timing import copies_beyond_l2, time_rotating
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import regroup
from lospmm.store import Store
from lospmm.toolchain import elf
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.elf_rewrite import rewrite
from lospmm.tuning.build import for_emitter
from lospmm_datasets.synthetic import uniform

#: (m, k, n, sparsity), the tile size and the schedule: about the fastest that is known.
CASES = (
    ((768, 768, 4096, 0.9), TileSize(43, 608), Schedule(43, None, 2, 64)),
    ((3072, 768, 4096, 0.9), TileSize(94, 512), Schedule(16, None, 0, 128)),
    ((768, 768, 16384, 0.9), TileSize(96, 512), Schedule(18, None, 4, 128)),
    ((768, 768, 4096, 0.98), TileSize(96, 256), Schedule(72, None, 4, 128)),
)

LDG, STG, OPCODE_MASK = 0x981, 0x986, 0xFFF

#: Bits 84 to 86 of a load or store: what the caches do with its line (nvdisasm: EF 0, none 1, NA 5).
POLICY_BIT, POLICIES = 20, {"first to be evicted": 0, "normal": 1}

Code = NDArray[np.void]


class Variant(NamedTuple):
    name: str
    schedule: Schedule
    change: Callable[[MachineCode], MachineCode] | None = None
    policy: int | None = None  # of loads and stores, in place of "no allocation"


def variants(schedule: Schedule) -> list[Variant]:
    return [
        Variant("whole", schedule),
        Variant("without loads", schedule, lambda code: blanked(code, Opcode.LDG)),
        Variant("without stores", schedule, lambda code: blanked(code, Opcode.STG)),
        Variant("without multiply-adds", schedule, without_fmas),
        *(Variant(f"loads and stores {name}", schedule, policy=bits) for name, bits in POLICIES.items()),
        *(Variant(f"column group {g or 'all'}", replace(schedule, column_group=g)) for g in (1, 2, 4, 8, 0)),
        *(Variant(f"barrier every {step}", replace(schedule, lockstep=step)) for step in (0, 32, 64, 128, 256, 512)),
    ]


def blanked(code: MachineCode, op: Opcode) -> MachineCode:
    """Every such instruction is a NOP of the same length in time; nobody waits for what is not loaded."""
    form = code.form.copy()
    where = form["op"] == op
    nothing = blank(int(where.sum()))
    nothing["op"], nothing["stall"] = Opcode.NOP, form["stall"][where]
    form[where] = nothing
    if op == Opcode.LDG:
        form["wait"] &= 1 << ADDRESS_SCOREBOARD  # addresses are moved once they were read
    return replace(code, form=form)


def without_fmas(code: MachineCode) -> MachineCode:
    """Only those multiply-adds that wait for loads are left, and the code is shorter."""

    def shorter(tile: Code) -> Code:
        kept = tile[((tile["op"] != Opcode.FFMA_IMM) | (tile["wait"] != 0)) & (tile["op"] != Opcode.NOP)].copy()
        kept["reuse"] = 0
        return kept

    return each_tile(code, shorter)


def each_tile(code: MachineCode, change: Callable[[Code], Code]) -> MachineCode:
    """``code`` with each tile as ``change`` makes it, filled up to where the next one may begin."""
    parts: list[Code] = []
    starts = [0]
    for start, end in zip(code.starts, [*code.starts[1:], len(code.form)], strict=True):
        tile = change(code.form[start:end])
        nothing = blank(-len(tile) % LINE_INSTRUCTIONS)
        nothing["op"] = Opcode.NOP
        parts += [tile, nothing]
        starts.append(starts[-1] + len(tile) + len(nothing))
    return replace(code, form=np.concatenate(parts), starts=np.array(starts[:-1]))


def with_policy(cubin: bytes, kernel: str, policy: int) -> bytes:
    name = f".text.{kernel}"
    text = next(section.content for section in elf.sections(cubin) if section.name == name)
    words = np.frombuffer(text, "<u8").reshape(-1, 2).copy()
    memory = np.isin(words[:, 0] & OPCODE_MASK, (LDG, STG))
    words[memory, 1] = words[memory, 1] & ~np.uint64(7 << POLICY_BIT) | np.uint64(policy << POLICY_BIT)
    return rewrite(cubin, {name: words.tobytes()})


def timed(driver: Driver, problem: Problem, tile: TileSize, variant: Variant, store: Store) -> dict[str, Any]:
    tiling = regroup(problem.matrix, [tile.rows])[tile.rows]
    program = lower(problem, UnrolledPlan(tile, variant.schedule, tiling))
    emission = without_fetch(program, problem.device.arch)
    if variant.change is not None:
        assert emission.machine is not None
        emission = replace(emission, machine=variant.change(emission.machine))
    binary = compile_kernel(emission, arch=problem.device.arch, registers=program.registers, store=store, workers=1)
    cubin = binary.cubin if variant.policy is None else with_policy(binary.cubin, program.name, variant.policy)
    function, shape = driver.load(cubin, program.name), launch(program)
    sizes = 4 * problem.matrix.k * problem.n, 4 * problem.matrix.m * problem.n
    copies = copies_beyond_l2(sum(sizes), driver.l2_bytes())
    places = [tuple(driver.allocate(size) for size in sizes) for _ in range(copies)]
    values = np.random.default_rng(0).uniform(-1, 1, size=sizes[0] // 4).astype(np.float32)
    for b, _ in places:
        driver.upload(b, values)

    def run(copy: int) -> None:
        driver.launch(function, shape, [np.uint64(place) for place in places[copy]])

    found = {cache: time_rotating(driver, run, copies=count) for cache, count in (("cold", copies), ("warm", 1))}
    for place in places:
        for address in place:
            driver.free(address)
    return {
        "variant": variant.name,
        "cold_micros": round(found["cold"].micros, 2),
        "warm_micros": round(found["warm"].micros, 2),
        "spread": round(found["cold"].spread, 4),
        "code_bytes": binary.code_bytes,
    }


def records() -> Iterator[dict[str, Any]]:
    driver, device = open_driver(), detect_device()
    with tempfile.TemporaryDirectory() as directory:
        for (m, k, n, sparsity), tile, schedule in CASES:
            problem = for_emitter(Problem(uniform(m, k, sparsity, seed=0), n, device), "sass")
            for variant in variants(schedule):
                sizes = {"device": device.name, "m": m, "k": k, "n": n, "sparsity": sparsity, **tile._asdict()}
                yield {**sizes, **timed(driver, problem, tile, variant, Store(Path(directory)))}
    driver.close()


def main() -> None:
    record("ablation.jsonl", records(), _shown, description=__doc__)


def _shown(row: Row) -> str:
    problem = f"{row['m']} x {row['k']}, n {row['n']}, {row['sparsity']:.0%}, tile {row['rows']} x {row['cols']}"
    return f"{problem}  {row['variant']:35} cold {row['cold_micros']:7.2f}  warm {row['warm_micros']:7.2f} us"


if __name__ == "__main__":
    main()
