"""CUDA C++ on a CPU: the emitted text, unchanged, compiled by g++ behind shim.h, in its own process."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.emission import Emission
from lospmm.cpu.geometry import B_ADDRESS, C_ADDRESS, RESIDUAL_ADDRESS, Geometry, Run, refusal, stray_access
from lospmm.errors import VerificationFailed
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain import lifetime
from lospmm.toolchain.gxx import compile_shared_library
from lospmm.toolchain.process import Finished, Limits, run

#: Time limit in seconds: a million multiply-adds of 64 columns take one or two.
RUN_LIMITS = Limits(seconds=120.0, address_space_bytes=8 << 30)

#: Dots that the process writes in total.
HUNDREDTHS = 100

_HERE = Path(__file__).parent
_STRAY = re.compile(r"stray (\d+) ([BCR]) (-?\d+) (\d+)")
_OPERANDS = {"R": "the residual"}


def execute(emission: Emission, asked: Run) -> NDArray[np.float32]:
    """Run CUDA C++, as a row of ``RUNTIMES``. Raises VerificationFailed; ToolchainFault if g++ fails."""
    header = (_HERE / "shim.h").read_text()
    library = compile_shared_library(emission.source, header=header, store=Store(settings().cache_dir))
    numbers = [str(number) for number in (B_ADDRESS, C_ADDRESS, RESIDUAL_ADDRESS, *_sizes(asked.geometry))]
    c = np.full((asked.geometry.m, len(asked.columns)), np.nan, dtype=np.float32)
    with lifetime.temporary_directory() as directory:
        arrays: dict[str, NDArray[Any]] = {"columns": asked.columns.astype(np.int64), "c": c}
        arrays["b"] = asked.b.astype(np.float32)
        if asked.residual is not None:
            arrays["residual"] = asked.residual.astype(np.float32)
        for name, array in arrays.items():
            (directory / name).write_bytes(array.tobytes())
        (directory / "kernel.so").write_bytes(library)
        command: tuple[str | Path, ...] = (
            sys.executable,
            "-I",
            _HERE / "cpu_process.py",
            "./kernel.so",  # a path, not a name to search for
            emission.entry,
            *numbers,
        )
        finished = run(command, cwd=directory, limits=RUN_LIMITS, watch=lambda dots: asked.progress(dots, HUNDREDTHS))
        if finished.failure is not None:
            raise _failed(emission, finished)
        return np.fromfile(directory / "c", dtype=np.float32).reshape(c.shape)


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
    last_line = finished.stderr.strip().rpartition("\n")[2]
    return VerificationFailed(f"{emission.entry} on the CPU: {finished.failure} {last_line}".strip())
