"""The dense multiplication as a kernel: a C library with cuBLAS's prototypes in its place, on the CPU."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from lospmm.errors import GpuFault
from lospmm.gpu.libraries import cublas, dense
from lospmm.gpu.libraries.dense import CublasKernel
from lospmm.gpu.libraries.library import WORKSPACE_BYTES, Library, LibraryFault, load
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.convolution import Convolution
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import Epilogue
from lospmm.problem.problem import Problem
from tests.gpu.test_baselines import STREAM, HostDriver, drawn, fake  # noqa: F401 (a fixture)


@pytest.fixture
def opened(fake: str) -> Callable[[], Library]:  # noqa: F811
    return lambda: load(fake, cublas.TYPES, "cublasGetStatusName")


def problem_of(matrix: SparseMatrix, n: int, dtype: str = "float32") -> Problem:
    return Problem(matrix, n, DEVICES["h200"], dtype=DTYPES[dtype])


def opened_dense(problem: Problem, driver: HostDriver, open_library: Callable[[], Library]) -> CublasKernel:
    with patch.object(dense, "open_library", open_library):
        return CublasKernel(problem.matrix, problem.n, problem.dtype, driver)


def product(problem: Problem, kernel: CublasKernel, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel computes of a B, and what float64 does."""
    matrix, n, dtype = problem.matrix, problem.n, problem.dtype
    b = dtype.to_storage(np.random.default_rng(seed).uniform(-1, 1, size=(matrix.k, n)).astype(np.float32))
    c = dtype.to_storage(np.full((matrix.m, n), np.nan, dtype=np.float32))
    assert kernel(STREAM, b.ctypes.data, c.ctypes.data)
    a = matrix.to_scipy().astype(np.float64)
    return dtype.from_storage(c), a @ dtype.from_storage(b).astype(np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(17, 9, 13), (1, 40, 1), (40, 1, 5)])
def test_it_multiplies(opened: Callable[[], Library], dtype: str, m: int, k: int, n: int) -> None:
    problem, driver = problem_of(drawn(m, k, 0.4), n, dtype), HostDriver()
    kernel = opened_dense(problem, driver, opened)
    for seed in range(2):
        found, exact = product(problem, kernel, seed)
        limit = 4 * problem.dtype.unit_roundoff * k + 1e-6
        assert np.max(abs(found - exact), initial=0.0) <= limit
    kernel.unload()
    assert not driver.blocks


def test_zeros_are_written_out_piece_by_piece(opened: Callable[[], Library], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "PIECE_BYTES", 100)
    problem = problem_of(drawn(23, 7, 0.3), 4)
    found, exact = product(problem, opened_dense(problem, HostDriver(), opened))
    assert np.allclose(found, exact, atol=1e-5)


def test_handles_and_memory_come_back(opened: Callable[[], Library], fake: str) -> None:  # noqa: F811
    alive = ctypes.CDLL(fake).fake_alive
    before = alive()
    driver = HostDriver(free_bytes=WORKSPACE_BYTES)  # none for A
    with pytest.raises(GpuFault, match="OUT_OF_MEMORY"):
        opened_dense(problem_of(drawn(4096, 4096, 0.001), 4), driver, opened)
    assert not driver.blocks and alive() == before
    kernel = opened_dense(problem_of(drawn(4, 4, 0.5), 4), driver, opened)
    assert alive() == before + 1
    kernel.unload()
    assert not driver.blocks and alive() == before


def test_what_cublas_refuses_is_a_fault(opened: Callable[[], Library]) -> None:
    """The library of these tests takes one stream alone."""
    kernel = opened_dense(problem_of(drawn(4, 4, 0.5), 4), HostDriver(), opened)
    with pytest.raises(GpuFault, match="dense: cublasGemmEx: CUBLAS_STATUS_INVALID_VALUE"):
        kernel(STREAM + 1, 0, 0)


def test_without_cublas_it_says_what_to_install() -> None:
    def missing() -> Library:
        raise LibraryFault("libcublas is not installed; pip install nvidia-cublas")

    with pytest.raises(GpuFault, match="pip install nvidia-cublas"):
        opened_dense(problem_of(drawn(4, 4, 0.5), 4), HostDriver(), missing)


def test_what_it_does_not_do_is_refused() -> None:
    problem = problem_of(from_dense(np.ones((4, 2), dtype=np.float32)), 16)
    assert dense.refusal(problem) is None
    refused = {
        "a convolution": replace(problem, convolution=Convolution(1, 2, 4, 4, 1, 1)),
        "an epilogue": replace(problem, epilogue=Epilogue(relu=True)),
        "takes more than": problem_of(
            SparseMatrix(
                1 << 17, 1 << 17, np.zeros((1 << 17) + 1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32)
            ),
            1,
        ),
    }
    for why, one in refused.items():
        assert why in str(dense.refusal(one))
