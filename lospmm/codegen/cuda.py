"""CUDA C++: the text to read, to change and to run on a CPU (runtime/shim.h makes it compile with g++ as it is)."""

from lospmm.codegen.emission import Emission
from lospmm.codegen.units import describe_rows, group_tiles
from lospmm.ir import ZERO, KernelProgram, Op, TileProgram

PRELUDE = """\
// A tile ends its thread instead of returning: nothing is saved for a caller that has nothing left to do.
#ifndef LOSPMM_TILE
#define LOSPMM_TILE extern "C" [[noreturn]] __device__ __noinline__ void
#define LOSPMM_END asm volatile("exit;"); __builtin_unreachable()
#endif
"""


def emit(program: KernelProgram, _arch: str) -> Emission:
    """``program`` as CUDA C++17 without includes, the same for every architecture."""
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
    return f"LOSPMM_TILE tile_{index}({_parameters(program)})"


def _parameters(program: KernelProgram) -> str:
    size = ", unsigned n" if program.n is None else ""
    return f"const float *__restrict__ b, float *__restrict__ c{size}"


def _tile(index: int, tile: TileProgram, program: KernelProgram) -> str:
    """One thread block function: b and c point to this thread's column of row 0 of B and C."""
    code = tile.code
    stores = code[code["op"] == Op.STORE]
    lines = [f"\n// rows {describe_rows(stores['target'].tolist())}", f"{_signature(index, program)} {{"]
    lines += [f"  float a{row} = 0.0f;" for row in range(tile.accumulators)]
    lines += [f"  float x{buffer};" for buffer in range(tile.buffers)]
    columns = (code[name].tolist() for name in ("op", "target", "source", "weight"))
    for op, target, source, weight in zip(*columns, strict=True):
        if op == Op.LOAD:
            lines.append(f"  x{target} = __ldcs(b + {_offset(source, program)});")
        elif op == Op.FMA:
            lines.append(f"  a{target} = __fmaf_rn(x{source}, {_literal(weight)}, a{target});")
        else:
            value = "0.0f" if source == ZERO else f"a{source}"
            lines.append(f"  __stcs(c + {_offset(target, program)}, {value});")
    return "\n".join((*lines, "  LOSPMM_END;", "}\n"))


def _offset(row: int, program: KernelProgram) -> str:
    """Elements from row 0 to ``row`` of a matrix with n columns."""
    return f"{row}ull * n" if program.n is None else f"{row * program.n}ull"


def _literal(weight: float) -> str:
    """A float32 exactly, in hexadecimal (C++17, [lex.fcon])."""
    mantissa, exponent = weight.hex().split("p")
    return f"{mantissa.rstrip('0')}p{exponent}f"


def _entry(program: KernelProgram) -> str:
    """The kernel: finds this thread's column, leaves if there is none, and runs the block row's tile."""
    width = "blockDim.x" if program.cols is None else f"{program.cols}u"
    columns = "n" if program.n is None else f"{program.n}u"
    bounds = "" if program.cols is None else f" __launch_bounds__({program.cols})"
    arguments = "b, c, n" if program.n is None else "b, c"
    cases: dict[int, list[str]] = {}
    for block_row, index in enumerate(program.dispatch):
        cases.setdefault(index, []).append(f"case {block_row}:")
    return "\n".join(
        (
            f'\nextern "C" __global__ void{bounds}',
            f"{program.name}({_parameters(program)}) {{",
            f"  const unsigned column = (blockIdx.z * gridDim.x + blockIdx.x) * {width} + threadIdx.x;",
            f"  if (column >= {columns}) return;",
            "  b += column;",
            "  c += column;",
            "  switch (blockIdx.y) {",
            *(f"    {' '.join(labels)} return tile_{index}({arguments});" for index, labels in cases.items()),
            "  }",
            "}\n",
        )
    )
