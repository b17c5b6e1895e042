"""What a kernel of 16-bit elements with float32 sums computes: what float32 does, of rounded numbers, rounded once."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.ops import Op
from tests.fixtures.interpret import interpret


def rounded_oracle(
    program: KernelProgram, b: NDArray[np.float32], residual: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """C; B and the residual are rounded to the program's type already."""
    tiles = []
    for tile in program.tiles:
        code = tile.code.copy()
        fmas = code["op"] == Op.FMA
        code["weight"][fmas] = program.dtype.rounded(code["weight"][fmas])
        tiles.append(replace(tile, code=code))
    return program.dtype.rounded(interpret(replace(program, tiles=tuple(tiles)), b, residual))
