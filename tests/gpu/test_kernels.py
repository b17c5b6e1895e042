"""Kernels on a real GPU: every column of C against float64, on memory that held NaN before."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.estimate_on_gpu import Gpu, check
from lospmm import jobs
from lospmm.artifact import Artifact
from lospmm.matrix import SparseMatrix, from_dense
from lospmm.model import Launch, Problem
from lospmm.runtime.detect import detect_device
from lospmm.verify import MAX_RELATIVE_ERROR, compare

pytestmark = pytest.mark.gpu


def dense(m: int, k: int, density: float) -> np.ndarray:
    rng = np.random.default_rng(m * k)
    return np.where(rng.random((m, k)) < density, rng.normal(size=(m, k)), 0)


def without_rows(weights: np.ndarray, every: int) -> np.ndarray:
    weights[np.arange(len(weights)) % every != 0] = 0
    return weights


CASES = {
    "a layer": (dense(256, 576, 0.1), 4096),
    "ragged": (dense(100, 147, 0.1), 1003),
    "one column": (dense(64, 64, 0.2), 1),
    "mostly empty rows": (without_rows(dense(512, 128, 0.3), 11), 500),
    "no nonzero": (np.zeros((130, 20)), 77),
    "strides beyond 16 MiB": (dense(6, 40, 0.5), 5_000_000),
}


def built(matrix: SparseMatrix, n: int, emitter: str) -> tuple[Problem, Artifact]:
    problem = Problem(matrix, n, detect_device())
    request = jobs.Request(problem, jobs.Options(emitter=emitter))
    return problem, jobs.tune(request, store=jobs.open_store())


@pytest.mark.parametrize("emitter", ["ptx", "cuda"])
@pytest.mark.parametrize("case", CASES)
def test_a_tuned_kernel_is_right_on_the_gpu(case: str, emitter: str) -> None:
    from cuda.bindings import driver

    weights, n = CASES[case]
    problem, kernel = built(from_dense(weights), n, emitter)
    gpu = Gpu(replace(problem, device=replace(problem.device, l2_bytes=1)))  # two copies of the buffers are enough
    module = check(driver.cuModuleLoadData(kernel.cubin))
    function = check(driver.cuModuleGetFunction(module, kernel.manifest["name"].encode()))
    registers = check(driver.cuFuncGetAttribute(driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, function))
    assert registers == kernel.manifest["registers"]
    shape = Launch(tuple(kernel.manifest["launch"]["grid"]), kernel.manifest["launch"]["block"])
    c = gpu.result(function, shape)
    assert compare(problem.matrix, np.arange(n), gpu.b, c) <= MAX_RELATIVE_ERROR
    for pointers in gpu.buffers:
        for pointer in pointers:
            check(driver.cuMemFree(pointer))
