"""PTX: what ptxas compiles without nvcc, gcc or headers (PTX ISA, sections 9 to 11).

Cache hints need PTX 7.4; each architecture is named with the oldest version that knows it, so that older toolkits take
the text too. No element of B or C is kept in a cache for long: a thread block uses each once, and what they would push
out of the L2 cache is the code, which every block walks (docs/decisions/0008). A load or store of sm_75 and up reaches
8 MiB either side of its base register (a signed 24-bit immediate), so a tile that walks further moves its base by whole
windows of 16 MiB.
"""

from collections.abc import Sequence

import numpy as np

from lospmm.codegen.emission import Emission
from lospmm.codegen.units import describe_rows, group_tiles
from lospmm.errors import Unsupported
from lospmm.ir import ZERO, KernelProgram, Op, TileProgram

#: The oldest PTX version that knows the architecture, and 7.4 at least (PTX ISA, release notes).
PTX_VERSIONS = {
    "sm_70": "7.4", "sm_75": "7.4", "sm_80": "7.4", "sm_86": "7.4", "sm_87": "7.4", "sm_89": "7.8", "sm_90": "7.8",
    "sm_90a": "8.0", "sm_100": "8.6", "sm_100a": "8.6", "sm_103": "8.8", "sm_110": "9.0", "sm_120": "8.7",
    "sm_121": "8.8",
}  # fmt: skip

WINDOW_BYTES = 1 << 24


def emit(program: KernelProgram, arch: str) -> Emission:
    """``program`` as PTX for ``arch``. Raises Unsupported for an architecture that no PTX version is known for."""
    header = f".version {version_of(arch)}\n.target {arch}\n.address_size 64\n"
    tiles = [_tile(index, tile, program) for index, tile in enumerate(program.tiles)]
    entry = _entry(program)
    declarations = "".join(f".extern .func {_signature(index, program)};\n" for index in range(len(tiles)))
    groups = group_tiles(program.tiles)
    units = [header + "".join(tiles[index] for index in group) for group in groups]
    return Emission(
        language="ptx",
        entry=program.name,
        source=header + "".join(tiles) + entry,
        units=(*units, header + declarations + entry),
    )


def version_of(arch: str) -> str:
    """The ``.version`` that text for ``arch`` carries. Raises Unsupported for one that the table lacks."""
    if arch not in PTX_VERSIONS:
        raise Unsupported(f"ptx for {arch}: known are {', '.join(PTX_VERSIONS)}")
    return PTX_VERSIONS[arch]


def _signature(index: int, program: KernelProgram) -> str:
    size = ", .param .b32 n" if program.n is None else ""
    return f"tile_{index} (.param .b64 b, .param .b64 c{size}) .noreturn"


def _tile(index: int, tile: TileProgram, program: KernelProgram) -> str:
    """One thread block function: %b and %c point to this thread's column of row 0 of B and C."""
    stores = tile.code[tile.code["op"] == Op.STORE]
    body = _Body(program.n)
    columns = [tile.code[name].tolist() for name in ("op", "target", "source")]
    bits = tile.code["weight"].copy().view(np.uint32).tolist()
    for op, target, source, weight in zip(*columns, bits, strict=True):
        if op == Op.LOAD:
            body.lines.append(f"ld.global.nc.L1::no_allocate.f32 %x{target}, {body.address('b', source)};")
        elif op == Op.FMA:
            body.lines.append(f"fma.rn.f32 %a{target}, %x{source}, 0f{weight:08X}, %a{target};")
        else:
            value = "0f00000000" if source == ZERO else f"%a{source}"
            body.lines.append(f"st.global.L1::no_allocate.f32 {body.address('c', target)}, {value};")
    registers = [f".reg .b64 %b, %c, %p<{max(body.pointers, 1)}>;"]
    parameters = ["ld.param.b64 %b, [b];", "ld.param.b64 %c, [c];"]
    if program.n is None:
        registers.append(".reg .b32 %n;")
        parameters.append("ld.param.b32 %n, [n];")
    if tile.accumulators:
        registers.append(f".reg .f32 %a<{tile.accumulators}>, %x<{max(tile.buffers, 1)}>;")
    zeros = [f"mov.f32 %a{row}, 0f00000000;" for row in range(tile.accumulators)]
    return "\n".join(
        (
            f"\n// rows {describe_rows(stores['target'].tolist())}",
            f".visible .func {_signature(index, program)}",
            "{",
            *registers,
            *parameters,
            *zeros,
            *body.lines,
            "exit;",
            "}\n",
        )
    )


class _Body:
    """The statements of one function; knows how row k of B and row m of C are addressed."""

    def __init__(self, n: int | None) -> None:
        self.n = n
        self.lines: list[str] = []
        self.pointers = 0
        self._windows = {"b": (0, "%b"), "c": (0, "%c")}

    def address(self, base: str, row: int) -> str:
        if self.n is not None:
            return self._offset(base, row * self.n * 4)
        pointer = self._new_pointer()
        # row * 4 always fits 32 bits; a run-time n * 4 may not.
        self.lines.append(f"mad.wide.u32 {pointer}, %n, {row * 4}, %{base};")
        return f"[{pointer}]"

    def _offset(self, base: str, offset: int) -> str:
        window = (offset + WINDOW_BYTES // 2) // WINDOW_BYTES
        if window != self._windows[base][0]:
            pointer = self._new_pointer()
            self.lines.append(f"add.s64 {pointer}, %{base}, {window * WINDOW_BYTES};")
            self._windows[base] = (window, pointer)
        return f"[{self._windows[base][1]}+{offset - window * WINDOW_BYTES}]"

    def _new_pointer(self) -> str:
        self.pointers += 1
        return f"%p{self.pointers - 1}"


def _entry(program: KernelProgram) -> str:
    """The kernel: finds this thread's column, leaves if there is none, and jumps to the block row's tile."""
    return "\n".join((*entry_head(program), *_dispatch(program), "}\n"))


def entry_head(program: KernelProgram) -> Sequence[str]:
    """The kernel up to the jump: %tile is the block row, %b and %c point to this thread's column of row 0."""
    size = "" if program.n is not None else ",\n.param .u32 n"
    return [
        f"\n.visible .entry {program.name} (.param .u64 b, .param .u64 c{size})",
        *([f".maxntid {program.cols}"] if program.cols is not None else []),
        *([f".reqnctapercluster 1, {program.split_k}, 1"] if program.split_k > 1 else []),
        "{",
        ".reg .pred %outside;",
        ".reg .b32 %tile, %block, %group, %member, %members, %width, %thread, %column, %n;",
        ".reg .b64 %b, %c, %offset;",
        "mov.u32 %tile, %ctaid.y;",
        "mov.u32 %group, %ctaid.z;",
        "mov.u32 %members, %nctaid.x;",
        "mov.u32 %member, %ctaid.x;",
        "mad.lo.u32 %block, %group, %members, %member;",
        "mov.u32 %thread, %tid.x;",
        f"mov.u32 %width, {'%ntid.x' if program.cols is None else program.cols};",
        "mad.lo.u32 %column, %block, %width, %thread;",
        f"{'mov.u32 %n, ' + str(program.n) if program.n is not None else 'ld.param.u32 %n, [n]'};",
        "setp.ge.u32 %outside, %column, %n;",
        "@%outside exit;",
        "mul.wide.u32 %offset, %column, 4;",
        "ld.param.u64 %b, [b];",
        "ld.param.u64 %c, [c];",
        "cvta.to.global.u64 %b, %b;",
        "cvta.to.global.u64 %c, %c;",
        "add.s64 %b, %b, %offset;",
        "add.s64 %c, %c, %offset;",
    ]


def _dispatch(program: KernelProgram) -> Sequence[str]:
    """A jump table over block rows, and behind each label the call of a tile."""
    arguments = {"to_b": "%b", "to_c": "%c"} | ({"to_n": "%n"} if program.n is None else {})
    declared = " ".join(f".param .b{32 if name == 'to_n' else 64} {name};" for name in arguments)
    stored = " ".join(
        f"st.param.b{32 if name == 'to_n' else 64} [{name}], {value};" for name, value in arguments.items()
    )
    targets = ", ".join(f"TILE_{index}" for index in program.dispatch)
    lines = [f"targets: .branchtargets {targets};", "brx.idx %tile, targets;"]
    for index in range(len(program.tiles)):
        lines += [f"TILE_{index}: {{ {declared}", stored, f"call tile_{index}, ({', '.join(arguments)}); }}"]
    return lines
