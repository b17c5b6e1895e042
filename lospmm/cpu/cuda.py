"""CUDA C++ on a CPU: the emitted text, unchanged, compiled by g++ behind shim.h, in its own process."""

import re

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.emission import Emission
from lospmm.cpu.geometry import B_ADDRESS, C_ADDRESS, RESIDUAL_ADDRESS, Geometry, Run, refusal, stray_access
from lospmm.cpu.native import Arrays, fault_of, run_native
from lospmm.errors import VerificationFailed
from lospmm.toolchain.process import Finished

_STRAY = re.compile(r"stray (\d+) ([BCR]) (-?\d+) (\d+)")
_OPERANDS = {"R": "the residual"}


def execute(emission: Emission, asked: Run) -> NDArray[np.float32]:
    """Run CUDA C++, as a row of ``RUNTIMES``. Raises VerificationFailed; ToolchainFault if g++ fails."""
    numbers = (B_ADDRESS, C_ADDRESS, RESIDUAL_ADDRESS, *_sizes(asked.geometry))
    c = np.full((asked.geometry.m, len(asked.columns)), np.nan, dtype=np.float32)
    residual = None if asked.residual is None else asked.residual.astype(np.float32)
    arrays: Arrays = {
        "columns": asked.columns.astype(np.int64),
        "b": asked.b.astype(np.float32),
        "c": c,
        "residual": residual,
    }
    finished = run_native([emission.source], "shim.h", emission.entry, numbers, arrays, asked.progress)
    if finished.failure is not None:
        raise _failed(emission, finished)
    return c


def _sizes(geometry: Geometry) -> tuple[int, ...]:
    """Return the sizes of shim.h's ``Geometry``."""
    sizes = (geometry.m, geometry.k, geometry.n, geometry.cols, geometry.block_rows)
    launch = (geometry.grid[0], int(geometry.takes_residual))
    window = geometry.convolution
    if window is None:
        return (*sizes, *launch, 0, *(0,) * 14)
    kernel = (window.kernel_height, window.kernel_width)
    way = (*window.stride, *window.padding, *window.dilation, window.out_height, window.out_width)
    return (*sizes, *launch, 1, *window.input_shape, *kernel, *way)


def _failed(emission: Emission, finished: Finished) -> VerificationFailed:
    if stray := _STRAY.search(finished.stderr):
        line, operand, offset, column = stray.groups()
        named = _OPERANDS.get(operand, operand)
        return refusal(emission, int(line), stray_access(named, int(offset), int(column)))
    return fault_of(emission.entry, finished)
