"""Emitter of PTX, which ptxas compiles without nvcc, gcc or headers (PTX ISA, sections 9 to 11).

Cache hints need PTX 7.4; each architecture is named with the oldest version that knows it, so that older toolkits
accept the text too. No element of B or C is kept in a cache for long: a thread block uses each once, and they would
evict the code from the L2 cache, which every block walks (docs/decisions/0008). A load or store of sm_75 and up
reaches 8 MiB either side of its base register (a signed 24-bit immediate), so a tile that walks further moves its
base by whole windows of 16 MiB.

A thread of a padded convolution keeps ``%padded``, a bit for each row and column of its window that is in the padding.
One predicate says whether the elements being loaded are in the padding, another whether those being used are; each is
set again when the position in the window changes.
"""

from collections.abc import Sequence

import numpy as np

from lospmm.codegen.emission import Emission
from lospmm.codegen.ir import KernelProgram, TileProgram, describe_rows, group_tiles
from lospmm.codegen.ops import WINDOW_BYTES, ZERO, Op
from lospmm.errors import Unsupported
from lospmm.problem.convolution import Convolution

#: The oldest PTX version that knows the architecture, and 7.4 at least (PTX ISA, release notes).
PTX_VERSIONS = {
    "sm_70": "7.4", "sm_75": "7.4", "sm_80": "7.4", "sm_86": "7.4", "sm_87": "7.4", "sm_89": "7.8", "sm_90": "7.8",
    "sm_90a": "8.0", "sm_100": "8.6", "sm_100a": "8.6", "sm_103": "8.8", "sm_110": "9.0", "sm_120": "8.7",
    "sm_121": "8.8",
}  # fmt: skip

#: The first architecture on which a maximum may keep NaN (PTX ISA, max).
MAX_NAN_ARCH = 80


def emit(program: KernelProgram, arch: str) -> Emission:
    """Return ``program`` as PTX for ``arch``. Raises Unsupported as ``version_of``."""
    header = f".version {version_of(arch)}\n.target {arch}\n.address_size 64\n"
    tiles = [_tile(index, tile, program, arch) for index, tile in enumerate(program.tiles)]
    entry = "\n".join((*entry_head(program), *_dispatch(program), "}\n"))
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
    """Return the ``.version`` of PTX for ``arch``. Raises Unsupported for an unknown architecture."""
    if arch not in PTX_VERSIONS:
        raise Unsupported(f"ptx for {arch}: known are {', '.join(PTX_VERSIONS)}")
    return PTX_VERSIONS[arch]


def _signature(index: int, program: KernelProgram) -> str:
    parameters = ", ".join(f".param .b{bits} {name}" for name, bits in _passed(program).items())
    return f"tile_{index} ({parameters}) .noreturn"


def _passed(program: KernelProgram) -> dict[str, int]:
    """Return the arguments of a tile, by name, with their bits: addresses of its column, padding bits."""
    extra = {"residual": 64} if program.epilogue.residual else {}
    extra |= {"padded": 32} if program.is_guarded else {}
    return {"b": 64, "c": 64, **extra}


def _tile(index: int, tile: TileProgram, program: KernelProgram, arch: str) -> str:
    """Return the function of one tile: %b and %c point to this thread's column of row 0 of B and C."""
    stores = tile.code[tile.code["op"] == Op.STORE]
    body = _Body(program, arch)
    columns = [tile.code[name].tolist() for name in ("op", "target", "source")]
    bits = tile.code["weight"].copy().view(np.uint32).tolist()
    guards = program.guards(tile.code, tile.buffers).tolist()
    for op, target, source, weight, guard in zip(*columns, bits, guards, strict=True):
        if op == Op.LOAD:
            address = body.address("b", source)
            body.lines.append(f"{body.guard('load', guard)}ld.global.nc.L1::no_allocate.f32 %x{target}, {address};")
        elif op == Op.FMA:
            when = body.guard("use", guard)
            body.lines.append(f"{when}fma.rn.f32 %a{target}, %x{source}, 0f{weight:08X}, %a{target};")
        elif op == Op.RESIDUAL:
            body.lines.append(f"ld.global.nc.L1::no_allocate.f32 %a{target}, {body.address('residual', source)};")
        elif op == Op.BEGIN:
            body.lines.append(f"mov.f32 %a{target}, 0f{weight:08X};")
        elif op == Op.ADD:
            body.lines.append(f"add.rn.f32 %a{target}, %a{target}, 0f{weight:08X};")
        elif op == Op.FOLD:
            body.lines.append(f"add.rn.f32 %a{target}, %a{target}, %a{source};")
            body.lines.append(f"mov.f32 %a{source}, 0f00000000;")
        else:
            value = "0f00000000" if source == ZERO else body.stored(source)
            body.lines.append(f"st.global.L1::no_allocate.f32 {body.address('c', target)}, {value};")
    registers = [f".reg .b64 %b, %c, %p<{max(body.pointers, 1)}>;"]
    parameters = ["ld.param.b64 %b, [b];", "ld.param.b64 %c, [c];"]
    for name, width in list(_passed(program).items())[2:]:
        registers.append(f".reg .b{width} %{name};")
        parameters.append(f"ld.param.b{width} %{name}, [{name}];")
    if program.is_guarded:
        registers.append(".reg .b32 %bits;")
        registers.append(".reg .pred %load, %use;")
    if body.has_negative:
        registers.append(".reg .pred %negative;")
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
    """The statements of one function; it knows the addresses of rows of B and C and the guards of loads."""

    def __init__(self, program: KernelProgram, arch: str) -> None:
        self.program = program
        self.lines: list[str] = []
        self.pointers = 0
        self.has_negative = False
        self._keeps_nan = int(arch.removeprefix("sm_").rstrip("a")) >= MAX_NAN_ARCH
        self._windows = {name: (0, f"%{name}") for name in ("b", "c", "residual")}
        self._guards = {"load": 0, "use": 0}
        self._rows_of_b = program.b_elements(np.arange(program.k)).tolist()

    def address(self, base: str, row: int) -> str:
        elements = self._rows_of_b[row] if base == "b" else row * self.program.c_row_elements
        return self._offset(base, elements * 4)

    def guard(self, predicate: str, bits: int) -> str:
        """Return the predicate of an instruction that is skipped if any of ``bits`` is set in %padded."""
        if not bits:
            return ""
        if self._guards[predicate] != bits:
            self._guards[predicate] = bits
            self.lines += [f"and.b32 %bits, %padded, {bits};", f"setp.ne.u32 %{predicate}, %bits, 0;"]
        return f"@!%{predicate} "

    def stored(self, accumulator: int) -> str:
        """Return the register that is stored for an accumulator, after ReLU, which keeps NaN."""
        name = f"%a{accumulator}"
        if self.program.epilogue.relu and self._keeps_nan:
            self.lines.append(f"max.NaN.f32 {name}, {name}, 0f00000000;")
        elif self.program.epilogue.relu:
            self.has_negative = True
            self.lines += [f"setp.lt.f32 %negative, {name}, 0f00000000;", f"@%negative mov.f32 {name}, 0f00000000;"]
        return name

    def _offset(self, base: str, offset: int) -> str:
        window = (offset + WINDOW_BYTES // 2) // WINDOW_BYTES
        if window != self._windows[base][0]:
            pointer = f"%p{self.pointers}"
            self.pointers += 1
            self.lines.append(f"add.s64 {pointer}, %{base}, {window * WINDOW_BYTES};")
            self._windows[base] = (window, pointer)
        return f"[{self._windows[base][1]}+{offset - window * WINDOW_BYTES}]"


def entry_head(program: KernelProgram) -> Sequence[str]:
    """Return the kernel up to the jump: %tile is the block row; %b and %c point to row 0 of the column."""
    residual = ",\n.param .u64 residual" if program.epilogue.residual else ""
    return [
        f"\n.visible .entry {program.name} (.param .u64 b, .param .u64 c{residual})",
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
        *(_column(program) if program.walks == 1 else _column_of_walks(program)),
        *(
            _own_of_product(program)
            if program.convolution is None
            else _own_of_convolution(program, program.convolution)
        ),
        *(_RESIDUAL if program.epilogue.residual else ()),
    ]


def _column(program: KernelProgram) -> Sequence[str]:
    """Return the statements that compute a thread's column and exit if it is outside."""
    return (
        "mad.lo.u32 %column, %block, %width, %thread;",
        f"mov.u32 %n, {program.n};",
        "setp.ge.u32 %outside, %column, %n;",
        "@%outside exit;",
    )


def _column_of_walks(program: KernelProgram) -> Sequence[str]:
    """Return the statements that compute a thread's first column; its second is %width further.

    The last block begins early enough to have all of its columns, some of which the block before it computes too.
    """
    assert program.cols is not None
    cols = program.walks * program.cols
    return (
        f"mul.lo.u32 %column, %block, {cols};",
        f"min.u32 %column, %column, {program.n - cols};",
        "add.u32 %column, %column, %thread;",
    )


def _own_of_product(program: KernelProgram) -> Sequence[str]:
    """Return the statements that set %b and %c of a column, ``%offset`` bytes into every row."""
    return (
        f"mul.wide.u32 %offset, %column, {program.words.stored_bytes};",
        "ld.param.u64 %b, [b];",
        "ld.param.u64 %c, [c];",
        "cvta.to.global.u64 %b, %b;",
        "cvta.to.global.u64 %c, %c;",
        "add.s64 %b, %b, %offset;",
        "add.s64 %c, %c, %offset;",
    )


#: As C; %offset is still its own.
_RESIDUAL = (
    ".reg .b64 %residual;",
    "ld.param.u64 %residual, [residual];",
    "cvta.to.global.u64 %residual, %residual;",
    "add.s64 %residual, %residual, %offset;",
)


def _own_of_convolution(program: KernelProgram, convolution: Convolution) -> Sequence[str]:
    """Return the statements that set %b to the start of the pixel's window, %c, and %padded."""
    (down, right), (top, left), size = convolution.stride, convolution.padding, program.words.stored_bytes
    return (
        ".reg .b32 %image, %pixel, %y, %x, %start;",
        ".reg .b64 %inner;",
        *_divided("%image", "%column", convolution.pixels),
        f"mad.lo.s32 %pixel, %image, {-convolution.pixels}, %column;",
        *_divided("%y", "%pixel", convolution.out_width),
        f"mad.lo.s32 %x, %y, {-convolution.out_width}, %pixel;",
        f"mad.lo.s32 %y, %y, {down}, {-top};",
        f"mad.lo.s32 %x, %x, {right}, {-left};",
        f"mad.lo.s32 %start, %y, {convolution.width}, %x;",
        "ld.param.u64 %b, [b];",
        "ld.param.u64 %c, [c];",
        "cvta.to.global.u64 %b, %b;",
        "cvta.to.global.u64 %c, %c;",
        f"mul.wide.u32 %offset, %image, {size * convolution.image_elements};",
        f"mul.wide.s32 %inner, %start, {size};",
        "add.s64 %b, %b, %offset;",
        "add.s64 %b, %b, %inner;",
        f"mul.wide.u32 %offset, %image, {size * program.m * convolution.pixels};",
        f"mul.wide.u32 %inner, %pixel, {size};",
        "add.s64 %offset, %offset, %inner;",
        "add.s64 %c, %c, %offset;",
        *(_padded(convolution) if convolution.is_padded else ()),
    )


def _padded(convolution: Convolution) -> Sequence[str]:
    """Return the statements that set %padded of a window that begins at row %y and column %x of the input.

    Places before the input are large as unsigned numbers.
    """
    lines = [".reg .b32 %padded, %at, %bit;", ".reg .pred %far;", "mov.u32 %padded, 0;"]
    for guard in convolution.guards:
        lines += [
            f"add.s32 %at, %{'yx'[guard.axis]}, {guard.offset};",
            f"setp.ge.u32 %far, %at, {guard.size};",
            f"selp.b32 %bit, {guard.bit}, 0, %far;",
            "or.b32 %padded, %padded, %bit;",
        ]
    return lines


def _divided(target: str, source: str, divisor: int) -> Sequence[str]:
    """Return ``target`` = ``source`` / ``divisor``, rounded down, for sources below 2^31, without floats.

    It multiplies by the reciprocal, rounded up (Warren, Hacker's Delight, section 10-9).
    """
    if divisor == 1:
        return (f"mov.u32 {target}, {source};",)
    shift = (divisor - 1).bit_length() - 1
    factor = (1 << 32 + shift) // divisor + 1
    return f"mul.hi.u32 {target}, {source}, {factor};", f"shr.u32 {target}, {target}, {shift};"


def _dispatch(program: KernelProgram) -> Sequence[str]:
    """Return a jump table over block rows, and behind each label the call of a tile."""
    passed = _passed(program)
    declared = " ".join(f".param .b{width} to_{name};" for name, width in passed.items())
    stored = " ".join(f"st.param.b{width} [to_{name}], %{name};" for name, width in passed.items())
    targets = ", ".join(f"TILE_{index}" for index in program.dispatch)
    lines = [f"targets: .branchtargets {targets};", "brx.idx %tile, targets;"]
    for index in range(len(program.tiles)):
        lines += [
            f"TILE_{index}: {{ {declared}",
            stored,
            f"call tile_{index}, ({', '.join(f'to_{name}' for name in passed)}); }}",
        ]
    return lines
