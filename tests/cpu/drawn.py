"""Problems and their kernels, drawn by Hypothesis, and kernels of a fixed matrix to damage."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from lospmm.codegen import emit
from lospmm.codegen.emission import Emission
from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import lower
from lospmm.matrix.csr import SparseMatrix, from_coo, from_csr
from lospmm.problem.device import find_device
from lospmm.problem.problem import MAX_COLUMNS, Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order, regroup
from lospmm.toolchain.discover import find_host_compiler

DEVICE = find_device("h200")
ARCH = "sm_90"

#: Every emitter; the one that needs g++ is skipped where there is none.
LANGUAGES = (
    "ptx",
    pytest.param("cuda", marks=pytest.mark.skipif(find_host_compiler() is None, reason="no g++ on this machine")),
)

#: Of the greatest weight: weights that all vanish in a 16-bit type are refused for it.
LEAST = 2.0**-14

weights = st.floats(-8.0, 8.0, width=32).filter(bool)
schedules = st.builds(
    Schedule,
    prefetch=st.integers(1, 80),
    column_group=st.integers(0, 5),
)


@st.composite
def matrices(draw: st.DrawFn) -> SparseMatrix:
    """Up to 24 x 40, from all zero to dense."""
    m, k = draw(st.integers(1, 24)), draw(st.integers(1, 40))
    entries = draw(st.dictionaries(st.integers(0, m * k - 1), weights, max_size=draw(st.sampled_from([0, 10, 200]))))
    position = np.array(sorted(entries), dtype=np.int64)
    values = np.array([entries[key] for key in sorted(entries)], dtype=np.float32)
    if values.size and abs(values).max() < LEAST:
        values[0] = LEAST
    return from_coo((m, k), position // k, position % k, values)


@st.composite
def kernels(draw: st.DrawFn) -> tuple[Problem, KernelProgram]:
    """A problem with up to twelve million columns, and a kernel for it whose threads may be left to its launch."""
    matrix = draw(matrices())
    n = draw(st.integers(1, 200) | st.sampled_from([12_000_000, 12_000_011, MAX_COLUMNS]))
    rows, cols = draw(st.integers(1, matrix.m)), draw(st.sampled_from([1, 3, 32, 128]))
    tiling = regroup(matrix, [rows])[rows] if draw(st.booleans()) else natural_order(matrix, rows)
    problem = Problem(matrix, n, DEVICE)
    program = lower(problem, UnrolledPlan(TileSize(rows, cols), draw(schedules), tiling))
    return problem, replace(program, cols=draw(st.sampled_from([program.cols, None])))


def random_matrix(m: int, k: int, density: float, seed: int = 0) -> SparseMatrix:
    random = np.random.default_rng(seed)
    rows, cols = np.nonzero(random.random((m, k)) < density)
    return from_coo((m, k), rows, cols, random.uniform(0.5, 2.0, len(rows)))


def two_tiles(language: str) -> tuple[Problem, KernelProgram, Emission]:
    """Two tiles of four rows, an empty row behind them, and 40 columns in blocks of 32."""
    matrix = random_matrix(8, 16, density=0.5)
    matrix = from_csr((9, 16), np.append(matrix.indptr, matrix.nnz), matrix.indices, matrix.data)
    problem = Problem(matrix, 40, DEVICE)
    program = lower(problem, UnrolledPlan(TileSize(4, 32), Schedule(prefetch=3), natural_order(matrix, 4)))
    return problem, program, emit(program, language, ARCH)
