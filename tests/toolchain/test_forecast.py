"""Section 3.2 against the real compiler: no survivor spills, and none uses more registers than were forecast.

A few kernels of every kind of GPU, small enough for every run; benchmarks/registers.py does the same for hundreds.
"""

import random
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.registers import draw
from lospmm.codegen import emit
from lospmm.codegen.lower import lower
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm_datasets.synthetic import uniform
from tests.fixtures.cubin_tools import cubin_tool

POOL = [
    (f"{m} x {k}", uniform(m, k, sparsity, 1)) for m, k, sparsity in ((40, 147, 0.7), (96, 64, 0.3), (256, 200, 0.9))
]


@pytest.mark.parametrize("number", range(6))
def test_a_survivor_needs_no_more_registers_than_forecast(number: int, tmp_path: Path) -> None:
    _, problem, candidate = draw(POOL, random.Random(number))
    program = lower(problem, candidate)
    language = "cuda" if number % 6 == 5 else "ptx"
    binary = compile_kernel(
        emit(program, language, problem.device.arch),
        arch=problem.device.arch,
        registers=program.registers,
        store=Store(tmp_path / "store"),
        workers=2,
    )
    assert binary.registers <= program.registers
    assert (binary.spill_bytes, binary.stack_bytes) == (0, 0)
    assert resources(binary.cubin, program.name, tmp_path) == (binary.registers, 0, 0)


def resources(cubin: bytes, entry: str, directory: Path) -> tuple[int, int, int]:
    """Registers, stack and local bytes of an entry, as cuobjdump sees them."""
    (directory / "kernel.cubin").write_bytes(cubin)
    command = [cubin_tool("cuobjdump"), "-res-usage", directory / "kernel.cubin"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(rf"Function {entry}:\s+REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", listing)
    assert usage is not None, listing
    return int(usage[1]), int(usage[2]), int(usage[3])
