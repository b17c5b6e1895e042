"""Kernels of families held to float64, on the CPU: what the tests of every family draw and check."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from lospmm.cpu.block import execute_packed, run_blocks
from lospmm.families import packed
from lospmm.families.packed import PackedKernel
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES, Dtype
from lospmm.problem.epilogue import PLAIN, Epilogue
from lospmm.problem.launch import WRITES_TOKENS
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compile import Binary, compile_kernel
from lospmm.toolchain.template import emission_of

H200 = DEVICES["h200"]

#: To |A| |B|: sums of float32, and the rounding of C to its type; factors are rounded before.
LIMITS = {"float32": 2e-6, "tf32": 2e-6, "float16": 2.0**-11 + 2e-6, "bfloat16": 2.0**-8 + 2e-6}


@st.composite
def matrices(draw: st.DrawFn, *, rows: int = 40, columns: int = 150) -> SparseMatrix:
    """Of any density, with empty rows and one full row where the draw says so."""
    m, k = draw(st.integers(1, rows)), draw(st.integers(1, columns))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    density = draw(st.sampled_from([0.0, 0.02, 0.1, 0.4, 1.0]))
    dense = np.where(rng.random((m, k)) < density, rng.normal(size=(m, k)), 0)
    if draw(st.booleans()):
        dense[rng.integers(m)] = rng.normal(size=k)
    dense[rng.random(m) < draw(st.sampled_from([0.0, 0.3]))] = 0
    return from_dense(dense.astype(np.float32))


@st.composite
def problems(draw: st.DrawFn, *, columns: int = 70) -> Problem:
    """A matrix, an N, a type and an epilogue."""
    matrix, n = draw(matrices()), draw(st.integers(1, columns))
    bias = tuple(np.linspace(-1, 1, matrix.m).tolist()) if draw(st.booleans()) else None
    epilogue = Epilogue(bias=bias, relu=draw(st.booleans()), residual=draw(st.booleans()))
    return Problem(matrix, n, H200, epilogue=epilogue, dtype=draw(st.sampled_from(list(DTYPES.values()))))


def plain(matrix: SparseMatrix, n: int, dtype: Dtype = DTYPES["float32"]) -> Problem:
    return Problem(matrix, n, H200, epilogue=PLAIN, dtype=dtype)


def tokens_first(kernel: PackedKernel) -> PackedKernel:
    """The same with C (n, m)."""
    found = packed.tokens_first(kernel.entry, kernel.source)
    assert found is not None
    return replace(kernel, entry=found[0], source=found[1])


def error_of(problem: Problem, kernel: PackedKernel, *, seed: int = 0) -> float:
    """The largest error of any element of C, as a multiple of what its type allows; infinite for one not written."""
    matrix, n, dtype, epilogue = problem.matrix, problem.n, problem.dtype, problem.epilogue
    rng = np.random.default_rng(seed)
    b, residual = (
        dtype.rounded(rng.uniform(-1, 1, size=(side, n)).astype(np.float32)) for side in (matrix.k, matrix.m)
    )
    given_residual = residual if epilogue.residual else None
    if kernel.entry.endswith("_tokens"):
        blocks, turned = np.arange(kernel.launch.grid[0]), np.full((n, matrix.m), np.nan, np.float32)
        given_b = b if kernel.entry.endswith(WRITES_TOKENS) else b.T
        c = run_blocks(kernel, blocks, given_b, turned, None if given_residual is None else given_residual.T).T
    else:
        c = execute_packed(kernel, np.arange(n), b, m=matrix.m, residual=given_residual)
    if np.isnan(c).any():
        return float("inf")
    exact, scale = _product(matrix, b, dtype)
    if epilogue.residual:
        exact, scale = exact + residual, scale + abs(residual)
    if epilogue.bias is not None:
        bias = np.array(epilogue.bias, dtype=np.float32).astype(np.float64)[:, np.newaxis]
        exact, scale = exact + bias, scale + abs(bias)
    exact = np.maximum(exact, 0) if epilogue.relu else exact
    allowed = LIMITS[dtype.name] * scale + (2.0**-24 if dtype.name == "float16" else 0.0)  # of the smallest halves
    return float(np.max(np.divide(abs(c - exact), allowed, out=np.zeros_like(exact), where=allowed > 0)))


def binary_of(kernel: PackedKernel, arch: str = "sm_90") -> Binary:
    """By the compilers that are here, with the registers that the kernel's plan allows."""
    store = Store(settings().cache_dir)
    return compile_kernel(emission_of(kernel), arch=arch, registers=kernel.registers, store=store, workers=1)


def _product(
    matrix: SparseMatrix, b: NDArray[np.float32], dtype: Dtype
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    a = matrix.to_scipy().astype(np.float64)
    a.data = dtype.rounded(matrix.data).astype(np.float64)
    exact: NDArray[np.float64] = a @ b.astype(np.float64)
    scale: NDArray[np.float64] = abs(a) @ abs(b.astype(np.float64))
    return exact, scale
