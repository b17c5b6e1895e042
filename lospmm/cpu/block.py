"""A packed kernel on a CPU: its text, unchanged, compiled by g++ behind block.h.

It runs in a process of its own, in whole blocks of threads: those whose columns include the chosen ones.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lospmm.cpu.native import Arrays, fault_of, run_native
from lospmm.errors import VerificationFailed
from lospmm.families.packed import PackedKernel
from lospmm.stages import Count, silent
from lospmm.toolchain.gxx import BLOCK_OPTIONS


def execute_packed(
    kernel: PackedKernel,
    columns: NDArray[np.int64],
    b: NDArray[np.float32],
    *,
    m: int,
    residual: NDArray[np.float32] | None = None,
    progress: Count = silent,
) -> NDArray[np.float32]:
    """Return C (m, n) of ``b`` (k, n), computed in the blocks that hold ``columns``; NaN elsewhere.

    ``progress`` is called with hundredths. Raises VerificationFailed if the kernel faults or writes to a column of
    another block, and ToolchainFault if g++ is missing or fails.
    """
    n = b.shape[1]
    block_of = np.arange(n) // kernel.cols % kernel.launch.grid[0]  # a block has every so many columns' tile
    blocks = np.unique(block_of[columns])
    result = run_blocks(kernel, blocks, b, np.full((m, n), np.nan, dtype=np.float32), residual, progress=progress)
    others = ~np.isin(block_of, blocks)
    if not np.isnan(result[:, others]).all():
        raise VerificationFailed(f"{kernel.entry} on the CPU: a block writes to columns of another one")
    return result


def run_blocks(
    kernel: PackedKernel,
    blocks: NDArray[np.int64],
    b: NDArray[np.float32],
    c: NDArray[np.float32],
    residual: NDArray[np.float32] | None = None,
    *,
    progress: Count = silent,
) -> NDArray[np.float32]:
    """Return ``c``, of any shape, after running the blocks of these numbers along x.

    Raises as ``execute_packed``.
    """
    dtype, texts = kernel.dtype, (Path(__file__).with_name("block.cpp").read_text(), kernel.source)
    stored = dtype.to_storage(c).copy()
    arrays: Arrays = {
        "columns": blocks.astype(np.int64),
        "data": np.frombuffer(kernel.data, dtype=np.uint8),
        "b": dtype.to_storage(b),
        "c": stored,
        "residual": None if residual is None else dtype.to_storage(residual),
    }
    launch = kernel.launch
    shape = (*launch.grid, launch.block, launch.shared_bytes)
    finished = run_native(texts, "block.h", kernel.entry, shape, arrays, progress, BLOCK_OPTIONS)
    if finished.failure is not None:
        raise fault_of(kernel.entry, finished)
    return dtype.from_storage(stored)
