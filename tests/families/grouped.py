"""Problems for the families of groups, and their kernels held against float64."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from lospmm.cpu.block import execute_packed
from lospmm.families.packed import PackedKernel
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.device import find_device
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import Epilogue
from lospmm.problem.problem import Problem
from tests.fixtures.real_layers import REAL_LAYERS

DEVICE = find_device("h200")

#: Architectures and types that a template is compiled for: one of them in every run.
compiled = pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("sm_90", DTYPES["float16"]),
        *(
            pytest.param(arch, DTYPES[name], marks=pytest.mark.slow)
            for arch, name in (("sm_90", "float32"), ("sm_80", "tf32"), ("sm_80", "bfloat16"))
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else one.name,
)

#: A file of each kind: empty rows, few columns, trained weights.
REAL = (
    "dlmc/rn50/extended_magnitude_pruning/0.96/bottleneck_3_block_group3_1_1.smtx",
    "sparsert/*.npz",
)


@st.composite
def matrices(draw: st.DrawFn, *, blocks: int = 1) -> SparseMatrix:
    """Up to 70 x 90: empty rows, and perhaps a row that is full; nonzeros in blocks of ``blocks`` x ``blocks``."""
    m, k = draw(st.integers(1, 70)), draw(st.integers(1, 90))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = -(-m // blocks), -(-k // blocks)
    chance = draw(st.sampled_from([0.0, 0.02, 0.1, 0.4])) * random.uniform(0, 2, size=(shape[0], 1)) ** 2
    there = np.kron(random.random(shape) < chance, np.ones((blocks, blocks), bool))[:m, :k]
    if draw(st.booleans()):
        there[random.integers(m)] = True
    values = random.choice([-1, 1], size=(m, k)) * random.uniform(0.1, 2, size=(m, k))
    return from_dense(np.where(there, values, 0).astype(np.float32))


@st.composite
def problems(draw: st.DrawFn, *, blocks: int = 1) -> Problem:
    matrix = draw(matrices(blocks=blocks))
    epilogue = Epilogue(
        tuple(float(row % 5 - 2) for row in range(matrix.m)) if draw(st.booleans()) else None,
        relu=draw(st.booleans()),
        residual=draw(st.booleans()),
    )
    n = draw(st.integers(1, 70) | st.sampled_from([128, 136, 260]))
    return Problem(matrix, n, DEVICE, None, epilogue, draw(st.sampled_from(list(DTYPES.values()))))


def check(problem: Problem, kernel: PackedKernel, seed: int = 0, columns: NDArray[np.int64] | None = None) -> None:
    """Run a kernel on the CPU, and hold C against float64: within the rounding of its sums and of its elements."""
    matrix, dtype, epilogue, n = problem.matrix, problem.dtype, problem.epilogue, problem.n
    random = np.random.default_rng(seed)
    b = random.uniform(-1, 1, size=(matrix.k, n)).astype(np.float32)
    residual = random.uniform(-1, 1, size=(matrix.m, n)).astype(np.float32) if epilogue.residual else None
    every = np.arange(n) if columns is None else columns
    c = execute_packed(kernel, every, b, m=matrix.m, residual=residual)[:, every]
    a = matrix.to_scipy().astype(np.float64)
    a.data = dtype.rounded(matrix.data).astype(np.float64)
    stored = dtype.from_storage(dtype.to_storage(b)).astype(np.float64)[:, every]
    expected, size = a @ stored, abs(a) @ abs(stored)
    if residual is not None:
        added = dtype.from_storage(dtype.to_storage(residual)).astype(np.float64)[:, every]
        expected, size = expected + added, size + abs(added)
    if epilogue.bias is not None:
        bias = np.array(epilogue.bias)[:, np.newaxis]
        expected, size = expected + bias, size + abs(bias)
    if epilogue.relu:
        expected = np.maximum(expected, 0)
    rounding = dtype.unit_roundoff if dtype.element_bytes == 2 else 0.0
    of_product = 2.1 * dtype.unit_roundoff if dtype.name == "tf32" else 2.0**-20
    least = 2.0**-24 if dtype.name == "float16" else 1e-30  # a subnormal number has fewer bits
    allowed = of_product * size + rounding * abs(expected) + least
    wrong = ~(abs(c - expected) <= allowed)
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size}, first {np.argwhere(wrong)[0]}: {c[wrong][0]} for {expected[wrong][0]}"
    )


def real_files() -> list[Path]:
    files = [path for pattern in REAL for path in sorted(REAL_LAYERS.glob(pattern))[:2]]
    assert files, REAL_LAYERS
    return files
