"""The generated parts of docs/machine_code.md: the instructions of each generation, and how long emission takes."""

import re
from types import MappingProxyType

from lospmm.codegen.sass.fields import Row
from lospmm.codegen.sass.form import Opcode
from lospmm.codegen.sass.generations import GENERATIONS
from tests.docs.pages import DOCS
from tests.docs.results import records, table, to_cubin_seconds
from tests.docs.worked_example import fenced, tile_listing

#: What the tiles of today are made of, and what it does there. The other rows of a generation are known, not written.
USES = MappingProxyType(
    {
        Opcode.LDG: "load an element of B",
        Opcode.FFMA_IMM: "multiply it by a weight and add",
        Opcode.STG: "store an element of C",
        Opcode.LOP3_TEST: "whether the element of a position lies in the padding",
        Opcode.MOV_IMM: "a bias, or zero where the first multiply-add may be left out",
        Opcode.FADD_IMM: "add a bias to a residual's sum",
        Opcode.FMNMX_NAN: "ReLU",
        Opcode.HADD2_F32: "make a float32 of a float16 that was loaded",
        Opcode.SHF_L: "of a bfloat16",
        Opcode.F2FP_F16: "round a sum to float16",
        Opcode.F2FP_BF16: "to bfloat16",
        Opcode.BAR_SYNC: "wait for the other warps of the block",
        Opcode.IADD3: "low half of the address of a window, or of code",
        Opcode.IADD3_X: "high half",
        Opcode.LEPC: "where a tile's code is, which it loads first",
        Opcode.TOUCH: "load a word of it",
        Opcode.EXIT: "end of the thread",
        Opcode.NOP: "fills the last line of a tile, never run",
    }
)


#: Operands as the table shows them.
SYNTAX = MappingProxyType(
    {
        **{name: name.capitalize() for name in ("rd", "ra", "rb", "rc")},
        "ur": "UR",
        "size": "",
        "offset": "+offset",
        "float": "weight",
        "hex": "0",
        "carry": "P0, ",
        "predicate": "P0",
        "signed": "distance",
        "part": "H0_H0",
        "bits": "0x10",
    }
)


def _bits(row: Row) -> str:
    return f"`{row.opcode:#05x}`"


def instructions() -> str:
    """What tiles are made of; a generation that has other bits than the newest shows its opcode again."""
    newest, *others = GENERATIONS.values()
    lines = []
    for op, use in USES.items():
        row = newest.by_op[op]
        different = [
            generation.arch
            for generation in others
            if op not in generation.by_op
            or (generation.by_op[op].opcode, generation.by_op[op].high) != (row.opcode, row.high)
        ]
        syntax = re.sub(r"\{(\w+)\}", lambda found: SYNTAX[found[1]], row.text)
        lines.append((f"`{syntax}`", use, _bits(row), ", ".join(different) or "-"))
    return table(("as nvdisasm prints it", "what it does", f"opcode, {newest.arch}", "other bits, or none, on"), lines)


def generations() -> str:
    lines = [
        (f"`{generation.arch}`", "experimental, `--emitter sass`" if generation.experimental else "default")
        for generation in GENERATIONS.values()
    ]
    return table(("generation", "use"), lines)


def lines() -> str:
    """The first load and the first multiply-add of a tile, below its rows."""
    rows, *code = tile_listing()
    first = (next(line for line in code if f" {name}" in line) for name in ("LDG", "FFMA"))
    return fenced("\n".join((rows, *first)))


def emission() -> str:
    found = records("emission")
    if not found:
        return "Nothing has been measured yet: `python -m benchmarks.emission`.\n"
    lines = []
    for record in found:
        seconds, peak = record["seconds"], record["peak_bytes"]
        lines.append(
            (
                f"{record['m']} x {record['k']}, {record['nnz']:,} nonzeros",
                *(f"{seconds[name]:.3f}" for name in ("program", "schedule", "encode", "graft")),
                f"**{to_cubin_seconds(record):.3f}**",
                f"{peak['cubin'] >> 20} MiB",
                f"{seconds['listing']:.3f}",
                f"{peak['listing'] >> 20} MiB",
            )
        )
    steps = ("program", "schedule", "encode", "graft", "to the cubin", "peak", "listing", "peak with it")
    headings = ("A", *steps)
    first = found[0]
    made_on = (
        f"Seconds, the best of {first['repeats']}, on one core of: {first['processor']}; Python "
        f"{first['versions']['python']}, NumPy {first['versions']['numpy']}. Medians are in the file. "
        f"{first['toolchain']} took {max(record['prologue_seconds'] for record in found):.2f} s for a prologue.\n"
    )
    return f"{table(headings, lines, right=len(headings) - 1)}\n{made_on}"


PAGE = DOCS / "machine_code.md"
REGIONS = {
    "machine code instructions": instructions,
    "machine code generations": generations,
    "machine code lines": lines,
    "machine code emission": emission,
}
