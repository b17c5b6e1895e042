"""The kernels that benchmarks make for themselves: they are built, and `Hazards` finds nothing in what it knows."""

import re
from pathlib import Path

import pytest

from benchmarks import moving
from fitting import clusters
from lospmm.codegen.emission import Emission
from lospmm.codegen.sass.form import Opcode
from lospmm.codegen.sass.machine import MachineCode
from lospmm.cpu.hazards import Hazards, instructions
from lospmm.problem.device import find_device
from lospmm.store import Store
from lospmm.toolchain import elf
from lospmm.toolchain.compile import compile_kernel

H200 = find_device("h200")


def check_hazards(code: MachineCode) -> None:
    """Every tile up to its end."""
    for start, end in zip(code.starts, [*code.starts[1:], len(code.form)], strict=True):
        hazards = Hazards(code.registers, code.entry.taken)
        for instruction in instructions(code.form[start:end]):
            hazards.issue(instruction)
            if instruction.op == Opcode.EXIT:
                break


def test_a_wait_behind_an_arrival(tmp_path: Path) -> None:
    kernels = {clusters.waiting_kernel(cycles, Store(tmp_path)) for cycles in clusters.WAIT_CYCLES}
    assert len(kernels) == len(clusters.WAIT_CYCLES)


@pytest.mark.parametrize(("b_bytes", "c_bytes"), [(64 * 784 * 4, 192 * 784 * 4), (768 * 27 * 4, 48 * 4), (16, 16)])
def test_kernels_that_only_move(b_bytes: int, c_bytes: int, tmp_path: Path) -> None:
    sizes = (b_bytes, c_bytes)
    vectors, bulk = moving.by_vectors(*sizes, 128, 2), moving.by_bulk(*sizes, 4096)
    for text, _ in (vectors, bulk):
        emission = Emission("ptx", moving.NAME, text, (text,))
        binary = compile_kernel(emission, arch="sm_90", registers=255, store=Store(tmp_path), workers=1)
        assert elf.kernel_usage(binary.cubin, moving.NAME).stack_bytes == 0, "nothing else is moved"
    text, launch = vectors
    for size, does in zip(sizes, ("ld.global", "st.global"), strict=True):
        assert 16 * text.count(does) * launch.block * launch.grid[0] >= size
    text, launch = bulk
    shares = re.findall(r"mul.lo.u32 %at, %block, (\d+); min.u32 %at, %at, (\d+);", text)
    for size, (share, last) in zip(sizes, shares, strict=True):
        assert int(share) * launch.grid[0] >= size == int(last) + int(share)


#: Of GPCs of 6, 4 and 5 SMs.
GROUPS = [[0, 1, 6, 7, 10, 11], [2, 3, 8, 9], [4, 5, 12, 13, 14]]
