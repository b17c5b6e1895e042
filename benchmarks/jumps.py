"""What a short kernel pays before its first load, and for each of its parts.

    python -m benchmarks.jumps [--out DIR]

needs an H200 or H100. ptxas's prologue reads where a tile's code begins from a table in constant memory, which no cache
has when a kernel starts. Where all tiles are made equally long it can be computed from the number of the block row
instead. Some of the 41 shapes at 98 % zeros are timed with both, and without their loads, multiply-adds, stores, or all
of a tile but its end (such kernels compute nothing of use). Writes ``jumps.jsonl`` and prints a line per kernel.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.ablation import blanked, without_fmas
from benchmarks.checked import Kernel, Operands
from benchmarks.early import cases
from benchmarks.kernels import SEED
from benchmarks.recorded import Row, record
from lospmm.build import for_emitter
from lospmm.codegen.emission import Emission
from lospmm.codegen.sass.emit import without_fetch
from lospmm.codegen.sass.form import Opcode, blank
from lospmm.codegen.sass.machine import ENTRY, MachineCode
from lospmm.dtype import FLOAT32
from lospmm.gpu.driver import open_driver
from lospmm.ir import KernelProgram, launch
from lospmm.lower import lower
from lospmm.model import Candidate, Problem
from lospmm.reorder import regroup
from lospmm.runtime.detect import detect_device
from lospmm.store import Store
from lospmm.toolchain import elf
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.elf_rewrite import rewrite
from lospmm_datasets.synthetic import uniform

TURNS = 2

SHAPES = (
    (2048, 512, 784), (1024, 464, 784), (320, 960, 784), (160, 960, 784), (232, 232, 784), (960, 160, 784),
    (1024, 256, 3136), (576, 96, 3136), (64, 192, 3136), (512, 128, 12544), (768, 768, 4096), (64, 64, 50176),
)  # fmt: skip

LINE = 8  # instructions

#: The words of instructions: opcode bits, and what is left of them when their operands are not.
OPCODE = 0xFFF
ULDC_INDEXED, BRXU, USHF, NOP = 0xABB, 0x958, 0x899, 0x918
UIMAD, UIMAD_CONTROL = 0x8A4, 0x000F8E023F
CONTROL = ~((1 << 41) - 1) & 0xFFFFFFFFFFFFFFFF


def equally_long(code: MachineCode) -> MachineCode:
    """With NOPs behind each tile, which are never run."""
    ends = [*code.starts[1:], len(code.form)]
    longest = max(end - start for start, end in zip(code.starts, ends, strict=True))
    parts: list[NDArray[np.void]] = []
    for start, end in zip(code.starts, ends, strict=True):
        nothing = blank(int(longest - (end - start)))
        nothing["op"] = Opcode.NOP
        parts += [code.form[start:end], nothing]
    return replace(code, form=np.concatenate(parts), starts=np.arange(len(ends)) * longest)


def computed(cubin: bytes, kernel: str, code: MachineCode) -> bytes:
    """``cubin`` of tiles that are equally long, without its table."""
    name = f".text.{kernel}"
    parts = {section.name: section.content for section in elf.sections(cubin)}
    head = int(np.frombuffer(parts[f".nv.constant2.{kernel}"], "<u4")[0])
    stride = 16 * int(code.starts[1]) if len(code.starts) > 1 else 0
    text = [int(word) for word in np.frombuffer(parts[name], "<u8")]
    ops = [text[2 * at] & OPCODE for at in range(head // 16)]
    jump = ops.index(BRXU)
    load = max(at for at in range(jump) if ops[at] == ULDC_INDEXED)
    register = text[2 * load] >> 24 & 0xFF
    shift = max(at for at in range(load) if ops[at] == USHF and text[2 * at] >> 16 & 0xFF == register)
    assert (
        text[2 * load] >> 16 & 0xFF == text[2 * jump] >> 24 & 0xFF == register
        and text[2 * shift] >> 24 & 0xFF == register
    )
    text[2 * shift] = UIMAD | 7 << 12 | register << 16 | register << 24 | stride << 32
    text[2 * shift + 1] = text[2 * shift + 1] & CONTROL | UIMAD_CONTROL
    text[2 * load] = NOP | 7 << 12
    text[2 * load + 1] &= CONTROL
    distance = (head - 16 * (jump + 1)) // 4
    text[2 * jump] = text[2 * jump] & 0xFF00FFFF & ~(0xFF << 16) | (distance & 0xFF) << 16 | distance >> 8 << 34
    text[2 * jump + 1] &= ~0x3FFFF
    return rewrite(cubin, {name: np.array(text, np.uint64).tobytes()})


def _control(stall: int, *, waits: Sequence[int] = (), announces: int = 7) -> int:
    """Of the upper word of an instruction: bits 41 and up. It yields where that is asked for by a stall above 11."""
    return (stall | (stall <= 11) << 4 | announces << 5 | 7 << 8 | sum(1 << one for one in waits) << 11) << 41


def lean(cubin: bytes, program: KernelProgram, code: MachineCode) -> bytes:
    """What ``computed`` gives, with a prologue of our own: everything is asked for before anything is waited for."""
    name = f".text.{program.name}"
    parts = {section.name: section.content for section in elf.sections(cubin)}
    text = [int(word) for word in np.frombuffer(parts[name], "<u8")]
    jump = next(at for at in range(len(text) // 2) if text[2 * at] & OPCODE == BRXU)
    assert program.n is not None and program.cols is not None and code.entry == ENTRY
    stride = 16 * int(code.starts[1]) if len(code.starts) > 1 else 0
    members = launch(program).grid[0]
    rows = [
        (0x0000000000007919, 0x2700 | _control(1, announces=0)),  # S2R R0 = ctaid.z
        (0x0000000000087919, 0x2500 | _control(1, announces=0)),  # S2R R8 = ctaid.x
        (0x0000000000077919, 0x2100 | _control(1, announces=1)),  # S2R R7 = tid.x
        (0x00000000000479C3, 0x2600 | _control(1, announces=2)),  # S2UR UR4 = ctaid.y
        (0x00008400FF027B82, 0x0A00 | _control(1, announces=3)),  # LDC.64 R2 = b
        (0x00008600FF047B82, 0x0A00 | _control(2, announces=4)),  # LDC.64 R4 = c
        (members << 32 | 0x00007824, 0x78E0208 | _control(5, waits=(0,))),  # IMAD R0 = R0 * members + R8
        (program.cols << 32 | 0x00077824, 0x78E0207 | _control(5, waits=(1,))),  # IMAD R7 = R0 * cols + R7
        (program.n << 32 | 0x0700780C, 0x3F06070 | _control(13)),  # ISETP P0 = R7 >= n
        (0x000000000000094D, 0x3800000 | _control(5, waits=(2, 3, 4))),  # @P0 EXIT
        (stride << 32 | 0x040478A4, UIMAD_CONTROL | _control(6)),  # UIMAD UR4 = UR4 * stride
        (0x0000820000067AB9, 0x0A00 | _control(7)),  # ULDC.64 UR6
        (0x0000001F3F057899, 0x8011404 | _control(1)),  # USHF.R UR5
        (0x0000000407027825, 0x78E0002 | _control(6)),  # IMAD.WIDE R2
        (0x0000000407047825, 0x78E0004 | _control(6)),  # IMAD.WIDE R4
    ]
    rows += [(NOP | 7 << 12, _control(1))] * (jump - len(rows))
    for at, words in enumerate(rows):
        text[2 * at], text[2 * at + 1] = words
    return rewrite(cubin, {name: np.array(text, np.uint64).tobytes()})


def _left_at_once(code: MachineCode) -> MachineCode:
    form = blank(LINE * len(code.starts))
    form["op"] = Opcode.NOP
    form["op"][::LINE] = Opcode.EXIT
    form["stall"][::LINE] = 5
    return replace(code, form=form, starts=np.arange(len(code.starts)) * LINE)


FORMS = {
    "table": equally_long,
    "without loads": lambda code: equally_long(blanked(code, Opcode.LDG)),
    "without stores": lambda code: equally_long(blanked(code, Opcode.STG)),
    "without multiply-adds": lambda code: equally_long(without_fmas(code)),
    "left at once": _left_at_once,
}
COMPUTED = ("table", "left at once")


def build(program: KernelProgram, emission: Emission, code: MachineCode, arch: str, store: Store) -> Kernel:
    binary = compile_kernel(
        replace(emission, machine=code), arch=arch, registers=program.registers, store=store, workers=1
    )
    return Kernel(binary.cubin, program.name, launch(program), binary.code_bytes)


def records() -> Iterator[Row]:
    yield from _timed(is_lean=False)
    yield from _timed(is_lean=True)  # last: it has run nowhere else


def _timed(*, is_lean: bool) -> Iterator[Row]:
    device = detect_device()
    driver = open_driver()
    with tempfile.TemporaryDirectory() as folder:
        for (m, k, n), sparsity, tiles in cases((0.98,)):
            if (m, k, n) not in SHAPES:
                continue
            problem = for_emitter(Problem(uniform(m, k, sparsity, seed=SEED), n, device), "sass")
            operands = Operands(driver, problem.matrix, n, FLOAT32)
            tile, schedule = tiles[0]
            program = lower(problem, Candidate(tile, schedule, regroup(problem.matrix, [tile.rows])[tile.rows]))
            emission = without_fetch(program, device.arch)
            assert emission.machine is not None
            kernels = {}
            for name, change in FORMS.items():
                if is_lean and name not in COMPUTED:
                    continue
                code = change(emission.machine)
                kernels[name] = build(program, emission, code, device.arch, Store(Path(folder)))
                if name in COMPUTED:
                    cubin = computed(kernels[name].cubin, program.name, code)
                    kernels[f"{name}, computed"] = replace(kernels[name], cubin=cubin)
                    if is_lean:
                        cubin = lean(cubin, program, code)
                        kernels[f"{name}, lean"] = replace(kernels[name], cubin=cubin)
            for turn in range(TURNS):
                for name, kernel in kernels.items():
                    labels = {"m": m, "k": k, "n": n, "sparsity": sparsity, "form": name, **tile._asdict()}
                    yield {"device": device.name, **labels, "code_bytes": kernel.code_bytes, "turn": turn,
                           **operands.time(kernel)}  # fmt: skip
            operands.close()
    driver.close()


def main() -> None:
    record("jumps", records(), description=__doc__)


if __name__ == "__main__":
    main()
