"""A problem of these tests, and a right kernel for it: PTX from the tuner's own emitter."""

from functools import cache

import numpy as np

from lospmm.codegen import emit
from lospmm.codegen.ir import launch
from lospmm.codegen.lower import lower
from lospmm.gpu.detect import detect_device
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import regroup
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel


def matrix(m: int, k: int, density: float = 0.1) -> SparseMatrix:
    """Random, and its last row empty."""
    rng = np.random.default_rng(m * k)
    weights = np.where(rng.random((m, k)) < density, rng.normal(size=(m, k)), 0)
    weights[-1] = 0
    return from_dense(weights)


@cache
def problem(m: int, k: int, n: int) -> Problem:
    return Problem(matrix(m, k), n, detect_device())


@cache
def good_kernel(case: Problem) -> tuple[bytes, str, Launch]:
    """Cubin, entry and launch of one candidate: 16 rows x 128 columns."""
    candidate = UnrolledPlan(TileSize(16, 128), Schedule(8), regroup(case.matrix, [16])[16])
    program = lower(case, candidate)
    arch = case.device.arch
    store = Store(settings().cache_dir)
    binary = compile_kernel(
        emit(program, "ptx", arch), arch=arch, registers=program.registers, store=store, workers=settings().workers
    )
    return binary.cubin, program.name, launch(program)
