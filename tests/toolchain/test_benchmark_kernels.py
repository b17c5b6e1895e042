"""The kernels that benchmarks make for themselves: they are built, and `Hazards` finds nothing in what it knows."""

from pathlib import Path

from fitting import clusters
from lospmm.codegen.sass.form import Opcode
from lospmm.codegen.sass.machine import MachineCode
from lospmm.cpu.hazards import Hazards, instructions
from lospmm.problem.device import find_device
from lospmm.store import Store

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
