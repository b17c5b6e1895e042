"""What the caches are told of loads and stores apart: whether to keep a line, and which to give up first.

    python -m benchmarks.hints [--out DIR]

needs an H200 or H100. Of the 41 shapes of section 7.1 at 98 % zeros, and some at 90 and 95 %, the tile that was chosen
before is timed with each pair of hints (``FORMS``); the kernels differ in nothing else. Forms take turns. Writes
``hints.jsonl`` and prints a line per kernel.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.ablation import LDG, OPCODE_MASK, POLICY_BIT, STG
from benchmarks.checked import Kernel
from benchmarks.early import Built, Case, cases, timed
from benchmarks.jumps import BRXU, CONTROL
from benchmarks.kernels import SEED
from benchmarks.recorded import record
from lospmm.build import for_emitter
from lospmm.codegen.emission import Emission
from lospmm.codegen.sass.emit import tiles_of
from lospmm.codegen.sass.fetch import FETCHED
from lospmm.codegen.sass.prologue import prologue
from lospmm.device import DeviceSpec
from lospmm.ir import launch
from lospmm.lower import lower
from lospmm.model import Candidate, Problem, Schedule, TileSize
from lospmm.reorder import regroup
from lospmm.store import Store
from lospmm.toolchain import elf
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.elf_rewrite import rewrite
from lospmm_datasets.synthetic import uniform

REGISTERS = 65_536

#: Shapes that are timed at 90 and 95 % zeros too.
DENSER = ((768, 768, 4096), (3072, 768, 4096), (256, 2304, 3136), (512, 128, 12544), (64, 576, 50176))

#: Of ``POLICY_BIT``, as nvdisasm names them: no hint, "no allocation".
NONE, NA = 1, 5

#: Descriptors of memory with a priority in the L2 cache for all lines, as ptxas makes them of ``createpolicy``.
L2_FIRST, L2_LAST, L2_NORMAL, L2_UNCHANGED = (kind << 52 for kind in (0x12F, 0x14F, 0x16F, 0x10F))

#: The prologue's load of the descriptor; where a kernel's third and fourth parameters are; what may be left out.
ULDC, DESCRIPTOR, PARAMETERS, FETCHED_SHIFT = 0xAB9, 0x208 // 4, (0x220 // 4, 0x228 // 4), 0x819

#: Of uniform registers: the one with the descriptor of stores, where they have one of their own.
STORES_DESCRIPTOR = 20
PLAIN_PARAMETERS, MORE_PARAMETERS = ".param .u64 c)", ".param .u64 c, .param .u64 loads, .param .u64 stores)"


class Form(NamedTuple):
    """Hints of loads and stores for the L1 cache, and priorities in the L2 cache; None: what a context gives."""

    loads: int = NA
    stores: int = NA
    loads_l2: int | None = None
    stores_l2: int | None = None


FORMS: Mapping[str, Form] = {
    "as it is": Form(),
    "stores none": Form(stores=NONE),
    "loads none": Form(loads=NONE),
    "loads none, stores none": Form(NONE, NONE),
    "L2 normal, normal": Form(loads_l2=L2_NORMAL, stores_l2=L2_NORMAL),
    "L2 first, normal": Form(loads_l2=L2_FIRST, stores_l2=L2_NORMAL),
    "L2 normal, first": Form(loads_l2=L2_NORMAL, stores_l2=L2_FIRST),
    "L2 first, first": Form(loads_l2=L2_FIRST, stores_l2=L2_FIRST),
    "L2 last, normal": Form(loads_l2=L2_LAST, stores_l2=L2_NORMAL),
    "L2 last, first": Form(loads_l2=L2_LAST, stores_l2=L2_FIRST),
    "L2 normal, last": Form(loads_l2=L2_NORMAL, stores_l2=L2_LAST),
    "L2 first, last": Form(loads_l2=L2_FIRST, stores_l2=L2_LAST),
    "L2 unchanged, first": Form(loads_l2=L2_UNCHANGED, stores_l2=L2_FIRST),
    "L2 normal, unchanged": Form(loads_l2=L2_NORMAL, stores_l2=L2_UNCHANGED),
    "L2 normal, first, stores none": Form(stores=NONE, loads_l2=L2_NORMAL, stores_l2=L2_FIRST),
    "L2 normal, normal, stores none": Form(stores=NONE, loads_l2=L2_NORMAL, stores_l2=L2_NORMAL),
}


def with_hints(cubin: bytes, kernel: str, form: Form) -> bytes:
    """``cubin``, in which every load of B and store of C that had "no allocation" has these hints."""
    name = f".text.{kernel}"
    text = next(section.content for section in elf.sections(cubin) if section.name == name)
    words = np.frombuffer(text, "<u8").reshape(-1, 2).copy()
    is_na = (words[:, 1] >> np.uint64(POLICY_BIT)) & np.uint64(7) == NA  # a fetch of code is none
    for opcode, policy in ((LDG, form.loads), (STG, form.stores)):
        at = is_na & (words[:, 0] & OPCODE_MASK == opcode)
        words[at, 1] = words[at, 1] & ~np.uint64(7 << POLICY_BIT) | np.uint64(policy << POLICY_BIT)
    if form.loads_l2 is not None:
        _set_descriptors(words)
    return rewrite(cubin, {name: words.tobytes()})


def _set_descriptors(words: NDArray[np.uint64]) -> None:
    """Loads have that of the third parameter, stores that of the fourth."""
    head = words[: int(np.flatnonzero(words[:, 0] & OPCODE_MASK == BRXU)[0])]
    (loads,) = np.flatnonzero((head[:, 0] & OPCODE_MASK == ULDC) & (head[:, 0] >> np.uint64(40) == DESCRIPTOR))
    (spare,) = np.flatnonzero(head[:, 0] & OPCODE_MASK == FETCHED_SHIFT)
    low, high = int(head[loads, 0]), int(head[loads, 1])
    kept = low & ~(0xFF << 16) & (1 << 40) - 1
    head[loads, 0] = kept | low & 0xFF << 16 | PARAMETERS[0] << 40
    head[spare, 0] = kept | STORES_DESCRIPTOR << 16 | PARAMETERS[1] << 40
    head[spare, 1] = int(head[spare, 1]) & CONTROL | high & ~CONTROL
    stores = words[:, 0] & OPCODE_MASK == STG
    words[stores, 1] = words[stores, 1] & ~np.uint64(0xFF) | np.uint64(STORES_DESCRIPTOR)


def is_plain(tile: TileSize, schedule: Schedule) -> bool:
    """Blocks that share nothing, of tiles that leave a few registers."""
    return schedule.split_k == 1 and tile.cols * (tile.rows + schedule.prefetch + 12) <= REGISTERS


def build(case: Case, device: DeviceSpec, folder: str) -> Built:
    (m, k, n), sparsity, tiles = case
    problem = for_emitter(Problem(uniform(m, k, sparsity, seed=SEED), n, device), "sass")
    tile, schedule = tiles[0]
    program = lower(problem, Candidate(tile, schedule, regroup(problem.matrix, [tile.rows])[tile.rows]))
    code = tiles_of(program, device.arch)
    text = prologue(program, device.arch, sharers=1).replace(PLAIN_PARAMETERS, MORE_PARAMETERS)
    emission = Emission(language="sass", entry=program.name, source="", units=(text,),
                        machine=replace(code, entry=replace(code.entry, fetched=FETCHED)))  # fmt: skip
    binary = compile_kernel(emission, arch=device.arch, registers=program.registers, store=Store(Path(folder)),
                            workers=1)  # fmt: skip
    labels = {**tile._asdict(), "registers": code.registers}
    cubins = {name: with_hints(binary.cubin, program.name, form) for name, form in FORMS.items()}
    return [
        (name, labels, Kernel(cubin, program.name, launch(program), binary.code_bytes))
        for name, cubin in cubins.items()
    ]


def wanted() -> Iterator[Case]:
    denser = (case for case in cases((0.95, 0.9)) if case[0] in DENSER)
    for case in (*cases((0.98,)), *denser):
        if is_plain(*case[2][0]):
            yield case


def priorities(form: str) -> tuple[np.uint64, np.uint64]:
    """What a kernel is given as its third and fourth argument."""
    return np.uint64(FORMS[form].loads_l2 or 0), np.uint64(FORMS[form].stores_l2 or 0)


def main() -> None:
    record("hints", timed([*wanted()], build, priorities), description=__doc__)


if __name__ == "__main__":
    main()
