"""B asked for before it is loaded: what a short kernel waits for where all its tiles walk the same rows of B.

    python -m benchmarks.ahead [--out DIR]

needs an H200 or H100. Blocks that run at the same time load the same few rows of B, ``prefetch`` of them, so only so
much of it is on its way from memory at a time, however many tiles there are. Here each tile asks for a share of all
rows of B behind its first loads: by prefetches into the L2 cache, or by loads into a register that nobody reads. Beside
them, loads with other hints to the caches, and what ``benchmarks.early`` calls turned and diagonal. Of the 41 shapes at
98 % zeros, with the tile that ``benchmarks.families`` chose. Writes ``ahead.jsonl`` and prints a line per kernel.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.ablation import with_policy
from benchmarks.checked import Kernel
from benchmarks.early import Built, Case, cases, diagonal, timed, turned
from benchmarks.kernels import SEED
from benchmarks.recorded import record
from lospmm.build import for_emitter
from lospmm.codegen.sass.emit import without_fetch
from lospmm.codegen.sass.form import Opcode, blank
from lospmm.codegen.sass.machine import MachineCode
from lospmm.codegen.sass.scheduler import HARDWARE_REGISTERS, padding
from lospmm.device import DeviceSpec
from lospmm.dtype import FLOAT32
from lospmm.ir import KernelProgram, Op, launch
from lospmm.lower import lower
from lospmm.model import Candidate, Problem
from lospmm.occupancy import resident_blocks
from lospmm.reorder import regroup
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm_datasets.synthetic import uniform

#: Hints to the caches: of ``benchmarks.ablation``.
HINTS = {"first to be evicted": 0, "normal": 1}

HINTED = ("plain", "turned", "prefetched")

#: A load reaches so far; a prefetch reaches everything.
REACH = 1 << 23


def asked_ahead(code: MachineCode, program: KernelProgram, op: Opcode) -> MachineCode:
    """``code`` whose tiles ask for the rows of B that follow their first loads, each for every so-manieth of them."""
    assert program.n is not None
    count = sum(1 for tile in program.tiles if tile.count(Op.LOAD))
    parts, ends = [], [*code.starts[1:], len(code.form)]
    for number, (start, end) in enumerate(zip(code.starts, ends, strict=True)):
        form = code.form[start:end]
        form = form[form["op"] != Opcode.NOP]
        fmas = np.flatnonzero(form["op"] == Opcode.FFMA_IMM)
        if len(fmas):
            loads = program.tiles[number].code
            first = int(loads["source"][loads["op"] == Op.LOAD][: program.tiles[number].buffers].max())
            offset = np.arange(first + 1 + number % count, program.k, count) * program.n * FLOAT32.element_bytes
            offset = offset if op == Opcode.PREFETCH else offset[offset < REACH]
            asked = blank(len(offset))
            asked["op"], asked["ra"], asked["offset"] = op, code.entry.b, offset
            if op == Opcode.LDG:
                asked["rd"], asked["bytes"], asked["ur"] = code.registers - HARDWARE_REGISTERS, 4, code.entry.descriptor
            form = np.concatenate((form[: fmas[0]], asked, form[fmas[0] :]))
        parts += [form, padding(len(form))]
    lengths = [len(form) + len(filler) for form, filler in zip(parts[::2], parts[1::2], strict=True)]
    starts = np.cumsum([0, *lengths[:-1]])
    return replace(code, form=np.concatenate(parts), starts=starts, registers=code.registers + (op == Opcode.LDG))


def build(case: Case, device: DeviceSpec, folder: str) -> Built:
    (m, k, n), sparsity, tiles = case
    problem = for_emitter(Problem(uniform(m, k, sparsity, seed=SEED), n, device), "sass")
    tile, schedule = next(one for one in tiles if one[1].split_k == 1)
    candidate = Candidate(tile, schedule, regroup(problem.matrix, [tile.rows])[tile.rows])
    program = lower(problem, candidate)
    programs = {
        "plain": program,
        "turned": turned(problem, candidate, program),
        "diagonal": diagonal(problem, candidate),
    }
    forms = {name: (one, without_fetch(one, device.arch)) for name, one in programs.items()}
    for name, op in (("prefetched", Opcode.PREFETCH), ("loaded", Opcode.LDG)):
        machine = forms["plain"][1].machine
        assert machine is not None
        needed = {"threads": tile.cols, "registers_per_thread": machine.registers + 1, "shared_bytes": 0}
        if op == Opcode.LDG and not resident_blocks(device, **needed):
            continue
        forms[name] = program, replace(forms["plain"][1], machine=asked_ahead(machine, program, op))
    found: Built = []
    for name, (one, emission) in forms.items():
        binary = compile_kernel(emission, arch=device.arch, registers=255, store=Store(Path(folder)), workers=1)
        kernel = Kernel(binary.cubin, one.name, launch(one), binary.code_bytes)
        found.append((name, {}, kernel))
        for hint, bits in HINTS.items() if name in HINTED else ():
            found.append((f"{name}, {hint}", {}, replace(kernel, cubin=with_policy(kernel.cubin, one.name, bits))))
    return found


def main() -> None:
    record("ahead", timed(cases((0.98,)), build), description=__doc__)


if __name__ == "__main__":
    main()
