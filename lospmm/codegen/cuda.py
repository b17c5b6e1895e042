"""Emitter of CUDA C++, which people can read and change, and a CPU can run.

``cpu/shim.h`` makes the text compile with g++ unchanged.
"""

from collections.abc import Sequence

from lospmm.codegen.emission import Emission
from lospmm.codegen.ir import KernelProgram, TileProgram, describe_rows, group_tiles
from lospmm.codegen.ops import ZERO, Op
from lospmm.problem.convolution import Convolution

PRELUDE = """\
// A tile ends its thread instead of returning: nothing is saved for a caller that has nothing left to do.
#ifndef LOSPMM_TILE
#define LOSPMM_TILE extern "C" [[noreturn]] __device__ __noinline__ void
#define LOSPMM_END asm volatile("exit;"); __builtin_unreachable()
#endif
"""


def emit(program: KernelProgram, _arch: str) -> Emission:
    """Return ``program`` as CUDA C++17 without includes, the same for every architecture."""
    tiles = [_tile(index, tile, program) for index, tile in enumerate(program.tiles)]
    declarations = "".join(f"{_signature(index, program)};\n" for index in range(len(tiles)))
    entry = _entry(program)
    return Emission(
        language="cuda",
        entry=program.name,
        source=PRELUDE + "".join(tiles) + entry,
        units=(
            *(PRELUDE + "".join(tiles[index] for index in group) for group in group_tiles(program.tiles)),
            PRELUDE + declarations + entry,
        ),
    )


def _signature(index: int, program: KernelProgram) -> str:
    padded = ", unsigned padded" if program.is_guarded else ""
    return f"LOSPMM_TILE tile_{index}({_parameters(program)}{padded})"


def _parameters(program: KernelProgram) -> str:
    residual = ", const float *residual" if program.epilogue.residual else ""
    return f"const float *__restrict__ b, float *__restrict__ c{residual}"


def _tile(index: int, tile: TileProgram, program: KernelProgram) -> str:
    """Return the function of one tile: b and c point to this thread's column of row 0 of B and C.

    Elements in a convolution's padding are zero: the multiply-adds that use them change nothing.
    """
    code = tile.code
    guards = program.guards(code, tile.buffers).tolist()
    rows_of_b = program.b_elements(code["source"]).tolist()
    stores = code[code["op"] == Op.STORE]
    lines = [f"\n// rows {describe_rows(stores['target'].tolist())}", f"{_signature(index, program)} {{"]
    lines += [f"  float a{row} = 0.0f;" for row in range(tile.accumulators)]
    lines += [f"  float x{buffer};" for buffer in range(tile.buffers)]
    columns = (code[name].tolist() for name in ("op", "target", "source", "weight"))
    for number, (op, target, source, weight) in enumerate(zip(*columns, strict=True)):
        if op == Op.LOAD:
            outside = f"padded & {guards[number]}u ? 0.0f : " if guards[number] else ""
            lines.append(f"  x{target} = {outside}__ldcs(b + {rows_of_b[number]}ull);")
        elif op == Op.FMA:
            lines.append(f"  a{target} = __fmaf_rn(x{source}, {_literal(weight)}, a{target});")
        elif op == Op.BEGIN:
            lines.append(f"  a{target} = {_literal(weight)};")
        elif op == Op.RESIDUAL:
            lines.append(f"  a{target} = __ldcs(residual + {source * program.c_row_elements}ull);")
        elif op == Op.ADD:
            lines.append(f"  a{target} = __fadd_rn(a{target}, {_literal(weight)});")
        elif op == Op.FOLD:
            lines.append(f"  a{target} = __fadd_rn(a{target}, a{source});")
            lines.append(f"  a{source} = 0.0f;")
        else:
            value = "0.0f" if source == ZERO else f"a{source}"
            if program.epilogue.relu and source != ZERO:
                value = f"a{source} < 0.0f ? 0.0f : a{source}"  # keeps NaN
            lines.append(f"  __stcs(c + {target * program.c_row_elements}ull, {value});")
    return "\n".join((*lines, "  LOSPMM_END;", "}\n"))


def _literal(weight: float) -> str:
    """Return a float32 exactly, in hexadecimal (C++17, [lex.fcon])."""
    mantissa, exponent = weight.hex().split("p")
    return f"{mantissa.rstrip('0')}p{exponent}f"


def _entry(program: KernelProgram) -> str:
    """Return the kernel: it finds this thread's column, leaves if there is none, and runs its tile."""
    width = "blockDim.x" if program.cols is None else f"{program.cols}u"
    bounds = "" if program.cols is None else f" __launch_bounds__({program.cols})"
    given = {"residual": program.epilogue.residual, "padded": program.is_guarded}
    arguments = ", ".join(("b", "c", *(name for name, is_given in given.items() if is_given)))
    cases: dict[int, list[str]] = {}
    for block_row, index in enumerate(program.dispatch):
        cases.setdefault(index, []).append(f"case {block_row}:")
    return "\n".join(
        (
            f'\nextern "C" __global__ void{bounds}',
            f"{program.name}({_parameters(program)}) {{",
            f"  const unsigned column = (blockIdx.z * gridDim.x + blockIdx.x) * {width} + threadIdx.x;",
            f"  if (column >= {program.n}u) return;",
            *_own_column(program),
            "  switch (blockIdx.y) {",
            *(f"    {' '.join(labels)} return tile_{index}({arguments});" for index, labels in cases.items()),
            "  }",
            "}\n",
        )
    )


def _own_column(program: KernelProgram) -> Sequence[str]:
    """Return the statements that move b, c and the residual to this thread's column and set ``padded``."""
    convolution, has_residual = program.convolution, program.epilogue.residual
    if convolution is None:
        return ("  b += column;", "  c += column;", *(("  residual += column;",) if has_residual else ()))
    (down, right), (top, left) = convolution.stride, convolution.padding
    own = f"image * {program.m * convolution.pixels}ull + pixel"
    return (
        f"  const unsigned image = column / {convolution.pixels}u, pixel = column % {convolution.pixels}u;",
        f"  const int y = int(pixel / {convolution.out_width}u) * {down} - {top};",
        f"  const int x = int(pixel % {convolution.out_width}u) * {right} - {left};",
        f"  b += image * {convolution.image_elements}ll + (y * {convolution.width} + x);",
        f"  c += {own};",
        *((f"  residual += {own};",) if has_residual else ()),
        *(_padded(convolution) if program.is_guarded else ()),
    )


def _padded(convolution: Convolution) -> Sequence[str]:
    """Return the statements that set ``padded``; places before the input are large as unsigned numbers."""
    lines = (
        f"  padded |= unsigned({'yx'[guard.axis]} + {guard.offset}) >= {guard.size}u ? {guard.bit}u : 0u;"
        for guard in convolution.guards
    )
    return "  unsigned padded = 0;", *lines
