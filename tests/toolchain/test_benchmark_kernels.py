"""The kernels that benchmarks make for themselves: they are built, and `Hazards` finds nothing in what it knows."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import clusters, ring_kernel, walking
from benchmarks.ring_kernel import Ring
from lospmm.codegen.sass.form import Opcode
from lospmm.device import find_device
from lospmm.model import Problem
from lospmm.runtime.hazards import Hazards, instructions
from lospmm.store import Store
from lospmm.toolchain import elf
from lospmm_datasets.synthetic import uniform


@pytest.mark.parametrize("multicast", [1, 2])
@pytest.mark.parametrize("without", ["", "copies", "multiply-adds"])
def test_a_ring(multicast: int, without: str, tmp_path: Path) -> None:
    problem = Problem(uniform(48, 64, 0.8, seed=0), 128, find_device("h200"))
    ring = Ring(16, 64, 8, 3, 4, multicast=multicast, without=without)
    kernel = ring_kernel.build(problem, ring, Store(tmp_path))
    assert kernel.launch.block == 96 and kernel.launch.shared_bytes == 1024 + 3 * 8 * 64 * 4
    assert kernel.launch.grid[1] == (3 if multicast == 1 else 4)
    assert elf.kernel_usage(kernel.cubin, ring_kernel.NAME).registers >= 24


@pytest.mark.parametrize("banks", walking.BANKS)
def test_a_walk(banks: str, tmp_path: Path) -> None:
    walk = walking.Walk(4, 8, banks=banks, loops=2)
    form = walking.body(walk, tile=3)
    end = int(np.argmax(form["op"] == Opcode.EXIT))
    hazards = Hazards(walk.registers, range(walking.FIRST_ACCUMULATOR, walking.FIRST_FACTOR + walking.FACTORS))
    for instruction in instructions(form[:end]):
        hazards.issue(instruction)
    fmas = form[form["op"] == Opcode.FFMA_IMM]
    same = np.mean((fmas["ra"] ^ fmas["rd"]) & 1 == 0)
    assert {"same": same == 1, "other": same == 0}.get(banks, 0.3 < same < 0.7)
    assert elf.kernel_usage(walking.kernel(walk, 2, Store(tmp_path)), walking.NAME).registers == walk.registers


def test_a_wait_behind_an_arrival(tmp_path: Path) -> None:
    kernels = {clusters.waiting_kernel(cycles, Store(tmp_path)) for cycles in clusters.WAIT_CYCLES}
    assert len(kernels) == len(clusters.WAIT_CYCLES)
