"""A kernel run once on a GPU behind the gate, and what it left in memory."""

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen import emit
from lospmm.codegen.ir import KernelProgram, launch
from lospmm.gpu import bench as measure
from lospmm.gpu import gate, operands
from lospmm.gpu.gate import GateVerdict
from lospmm.gpu.protocol import Driver
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel


def run(
    driver: Driver, problem: Problem, program: KernelProgram, emitter: str
) -> tuple[list[NDArray[np.float32]], GateVerdict]:
    """As ``run_cubin``, of a program that is compiled first."""
    arch, store = problem.device.arch, Store(settings().cache_dir)
    emission = emit(program, emitter, arch)
    binary = compile_kernel(emission, arch=arch, registers=program.registers, store=store, workers=settings().workers)
    return run_cubin(driver, problem, binary.cubin, program.name, launch(program))


def run_cubin(
    driver: Driver, problem: Problem, cubin: bytes, entry: str, launched: Launch
) -> tuple[list[NDArray[np.float32]], GateVerdict]:
    """B or the input, C, and the residual if there is one, as they lie in memory, after a run that the gate passed."""
    task = measure._prepare(problem, seed=1)
    bench = gate.prepare(task, driver)
    place = bench.operands
    function = driver.load(cubin, entry)

    def enqueue(copy: int) -> None:
        addresses = (place.b[copy], place.c[copy], *place.residual[copy : copy + 1])
        driver.launch(function, launched, tuple(map(np.uint64, addresses)))

    verdict = gate.run_and_check(bench, enqueue, copy=0)
    assert verdict.failure is None
    found = []
    for address, count in (
        (place.b[0], place.b_elements),
        (place.c[0], place.m * place.n),
        *((one, place.m * place.n) for one in place.residual[:1]),
    ):
        stored = np.empty(count, place.drawn.dtype)
        driver.download(stored, address)
        found.append(problem.dtype.from_storage(stored))
    operands.release(driver, place)
    return found, verdict
