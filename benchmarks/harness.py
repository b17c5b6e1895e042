"""What several benchmarks need."""

from benchmarks.checked import Kernel
from lospmm.codegen import emit
from lospmm.ir import launch
from lospmm.lower import lower
from lospmm.model import Candidate, Problem
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel


def build(problem: Problem, candidate: Candidate, store: Store) -> Kernel:
    """Machine code of ``candidate`` for the device of ``problem``."""
    program, arch = lower(problem, candidate), problem.device.arch
    binary = compile_kernel(emit(program, "sass", arch), arch=arch, registers=program.registers, store=store, workers=1)
    return Kernel(binary.cubin, program.name, launch(program), binary.code_bytes)
