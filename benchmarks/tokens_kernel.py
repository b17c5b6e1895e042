"""Kernels that read and write tokens first: what ``benchmarks.tokens_first`` times. No part of lospmm makes them.

X is tokens x features and so is Y, as a linear layer of PyTorch has them. A thread is one token. The threads of a block
copy slabs of features of their tokens into shared memory, coalesced and asynchronously, some stages ahead; a thread
then reads four features of its token at a time (rows are padded so that these reads meet no bank twice). Sums go back
through the same memory. Tiles are rows of A next to each other, because scattered features would be stored one by one.
Only for K that is a multiple of a slab, tokens of a block, M of the rows of a tile, and these of 4.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lospmm.codegen.emission import Emission
from lospmm.matrix import SparseMatrix
from lospmm.model import Launch
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel

NAME = "tokens"

_HEADER = ".version 8.0\n.target sm_90\n.address_size 64\n.extern .shared .align 16 .b8 memory[];\n"

#: Reads of four features that are under way when the first is used.
AHEAD = 3


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tile of ``rows``, for ``tokens`` threads. ``writes_first`` leaves Y features first, to see what writing costs;
    ``without`` leaves out a part: "copies" or "multiply-adds"."""

    rows: int
    tokens: int
    slab: int  # features, 16 or 32
    stages: int
    tile_fastest: bool = False
    writes_first: bool = False
    without: str = ""

    @property
    def row_bytes(self) -> int:
        """From a token's features in a slab to the next token's."""
        return 4 * (self.slab + 4)

    @property
    def stage_bytes(self) -> int:
        return self.tokens * self.row_bytes

    @property
    def out_bytes(self) -> int:
        return 4 * (self.rows + 4)

    @property
    def shared_bytes(self) -> int:
        return max(self.stages * self.stage_bytes, self.tokens * self.out_bytes)


@dataclass(frozen=True, slots=True)
class Kernel:
    cubin: bytes
    launch: Launch
    registers: int
    code_bytes: int


def build(matrix: SparseMatrix, n: int, shape: Tokens, store: Store) -> Kernel:
    """The kernel of ``shape`` for ``n`` tokens. Raises ToolchainFault."""
    assert matrix.k % shape.slab == 0 and n % shape.tokens == 0 and matrix.m % shape.rows == 0 and shape.rows % 4 == 0
    blocks = matrix.m // shape.rows
    dense = matrix.to_scipy().toarray().astype(np.float32)
    tiles = [_tile(index, dense[index * shape.rows :][: shape.rows], matrix.m, n, shape) for index in range(blocks)]
    declared = "".join(f".extern .func {_signature(index)};\n" for index in range(blocks))
    entry = _entry(matrix, shape, blocks)
    units = (*(_HEADER + tile for tile in tiles), _HEADER + declared + entry)
    emission = Emission("ptx", NAME, "".join(tiles) + entry, units)
    registers = min(255, 65536 // shape.tokens // 8 * 8)
    binary = compile_kernel(emission, arch="sm_90", registers=registers, store=store, workers=16)
    grid = (blocks, n // shape.tokens, 1) if shape.tile_fastest else (n // shape.tokens, blocks, 1)
    launch = Launch(grid, shape.tokens, shape.shared_bytes)
    return Kernel(binary.cubin, launch, binary.registers, binary.code_bytes)


def _signature(index: int) -> str:
    given = ".param .b64 x, .param .b64 y, .param .b32 to, .param .b32 own"
    return f"tile_{index} ({given}) .noreturn"


def _entry(matrix: SparseMatrix, shape: Tokens, blocks: int) -> str:
    """Each thread's share of the copies, and its place in shared memory."""
    across = shape.slab // 4  # threads that copy a token's features of a slab
    tile, block = ("%ctaid.x", "%ctaid.y") if shape.tile_fastest else ("%ctaid.y", "%ctaid.x")
    lines = [
        f".visible .entry {NAME} (.param .u64 x, .param .u64 y) .maxntid {shape.tokens}",
        "{",
        ".reg .b32 %tile, %block, %thread, %token, %part, %to, %own; .reg .b64 %x, %y, %offset;",
        f"mov.u32 %tile, {tile}; mov.u32 %block, {block}; mov.u32 %thread, %tid.x;",
        f"mul.lo.u32 %block, %block, {shape.tokens};",
        "ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; cvta.to.global.u64 %x, %x; cvta.to.global.u64 %y, %y;",
        f"shr.u32 %token, %thread, {across.bit_length() - 1}; and.b32 %part, %thread, {across - 1};",
        "mov.u32 %own, memory;",
        f"mad.lo.u32 %to, %token, {shape.row_bytes}, %own; mad.lo.u32 %to, %part, 16, %to;",
        f"mad.lo.u32 %own, %thread, {shape.row_bytes}, %own;",
        f"add.u32 %token, %token, %block; mad.wide.u32 %x, %token, {4 * matrix.k}, %x;",
        "mul.wide.u32 %offset, %part, 16; add.u64 %x, %x, %offset;",
        *(
            ("add.u32 %token, %block, %thread; mad.wide.u32 %y, %token, 4, %y;",)
            if shape.writes_first
            else (f"mad.wide.u32 %y, %block, {4 * matrix.m}, %y;",)
        ),
        f"targets: .branchtargets {', '.join(f'TILE_{index}' for index in range(blocks))};",
        "brx.idx %tile, targets;",
    ]
    for index in range(blocks):
        lines += [
            f"TILE_{index}: {{ .param .b64 a; .param .b64 b; .param .b32 c; .param .b32 d;",
            "st.param.b64 [a], %x; st.param.b64 [b], %y; st.param.b32 [c], %to; st.param.b32 [d], %own;",
            f"call tile_{index}, (a, b, c, d); }}",
        ]
    return "\n".join((*lines, "}\n"))


def _tile(index: int, a: np.ndarray, m: int, n: int, shape: Tokens) -> str:
    k, slabs = a.shape[1], a.shape[1] // shape.slab
    lines = [
        f".visible .func {_signature(index)}",
        "{",
        f".reg .b64 %x, %y, %p; .reg .b32 %to, %own, %thread, %q, %token, %part; .reg .f32 %a<{shape.rows}>;",
        f".reg .f32 %b<{4 * (AHEAD + 1)}>; .reg .f32 %v<4>;",
        "ld.param.b64 %x, [x]; ld.param.b64 %y, [y]; ld.param.b32 %to, [to]; ld.param.b32 %own, [own];",
        *(f"mov.f32 %a{row}, 0f00000000;" for row in range(shape.rows)),
    ]
    for slab in range(shape.stages - 1):
        lines += _copied(slab, slabs, k, shape)
    for slab in range(slabs):
        lines += [f"cp.async.wait_group {shape.stages - 2};", "bar.sync 0;"]
        lines += _copied(slab + shape.stages - 1, slabs, k, shape)
        lines += _used(a[:, slab * shape.slab :][:, : shape.slab], slab % shape.stages, shape)
    lines += _stored_first(index, n, shape) if shape.writes_first else _stored(index, m, shape)
    return "\n".join((*lines, "exit;", "}\n"))


def _copied(slab: int, slabs: int, k: int, shape: Tokens) -> Iterator[str]:
    """A slab into its stage, by all threads; a group, perhaps empty, for each that is waited for."""
    at_once = shape.tokens // (shape.slab // 4)  # tokens that the threads copy together
    for turn in range(shape.slab // 4 if slab < slabs and shape.without != "copies" else 0):
        to = slab % shape.stages * shape.stage_bytes + turn * at_once * shape.row_bytes
        yield f"cp.async.cg.shared.global [%to+{to}], [%x+{4 * (turn * at_once * k + slab * shape.slab)}], 16;"
    yield "cp.async.commit_group;"


def _used(a: np.ndarray, stage: int, shape: Tokens) -> Iterator[str]:
    fours = [at for at in range(shape.slab // 4) if a[:, 4 * at : 4 * at + 4].any()]

    def load(number: int) -> str:
        names = ", ".join(f"%b{4 * (number % (AHEAD + 1)) + lane}" for lane in range(4))
        return f"ld.shared.v4.f32 {{{names}}}, [%own+{stage * shape.stage_bytes + 16 * fours[number]}];"

    for number in range(min(AHEAD, len(fours))):
        yield load(number)
    for number, four in enumerate(fours):
        if number + AHEAD < len(fours):
            yield load(number + AHEAD)
        for lane in range(4):
            rows = np.flatnonzero(a[:, 4 * four + lane])
            if shape.without == "multiply-adds":
                rows = rows[:1]
            for row in rows:
                (bits,) = a[row : row + 1, 4 * four + lane].view(np.uint32).tolist()
                yield f"fma.rn.f32 %a{row}, %b{4 * (number % (AHEAD + 1)) + lane}, 0f{bits:08X}, %a{row};"


def _stored(index: int, m: int, shape: Tokens) -> Iterator[str]:
    """Sums into shared memory, a row for each token; then whole rows to Y, four features by a thread."""
    parts = shape.rows // 4
    yield "bar.sync 0; mov.u32 %thread, %tid.x; mov.u32 %q, memory;"
    yield f"mad.lo.u32 %own, %thread, {shape.out_bytes}, %q;"
    for part in range(parts):
        names = ", ".join(f"%a{4 * part + lane}" for lane in range(4))
        yield f"st.shared.v4.f32 [%own+{16 * part}], {{{names}}};"
    yield "bar.sync 0;"
    for turn in range(parts):
        yield f"add.u32 %q, %thread, {turn * shape.tokens}; div.u32 %token, %q, {parts};"
        yield f"mul.lo.u32 %part, %token, {parts}; sub.u32 %part, %q, %part; mov.u32 %own, memory;"
        yield f"mad.lo.u32 %own, %token, {shape.out_bytes}, %own; mad.lo.u32 %own, %part, 16, %own;"
        yield "ld.shared.v4.f32 {%v0, %v1, %v2, %v3}, [%own];"
        yield f"mad.wide.u32 %p, %token, {4 * m}, %y; mul.wide.u32 %x, %part, 16; add.u64 %p, %p, %x;"
        yield f"st.global.L1::no_allocate.v4.f32 [%p+{4 * index * shape.rows}], {{%v0, %v1, %v2, %v3}};"


def _stored_first(index: int, n: int, shape: Tokens) -> Iterator[str]:
    for row in range(shape.rows):
        yield f"add.u64 %p, %y, {4 * n * (index * shape.rows + row)};"
        yield f"st.global.L1::no_allocate.f32 [%p], %a{row};"
