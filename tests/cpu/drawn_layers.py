"""Convolutions and epilogues with kernels for them, drawn by Hypothesis."""

from dataclasses import dataclass

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from numpy.typing import NDArray

from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import lower
from lospmm.errors import BadRequest
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.convolution import Convolution, unfold
from lospmm.problem.device import find_device
from lospmm.problem.epilogue import Epilogue, epilogue_of
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order

DEVICE = find_device("h200")


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A problem, a kernel for it, and columns of what it is given: B with zeros for the padding."""

    problem: Problem
    program: KernelProgram
    columns: NDArray[np.int64]
    b: NDArray[np.float32]  # (k, columns)
    residual: NDArray[np.float32] | None  # (m, columns)

    @property
    def hidden_b(self) -> NDArray[np.float32]:
        """B with NaN for the padding, which must show nowhere."""
        convolution = self.problem.convolution
        if convolution is None:
            return self.b
        ones = np.ones(convolution.input_elements, np.float32)
        return np.where(unfold(convolution, ones, self.columns) == 0, np.float32(np.nan), self.b).astype(np.float32)

    @property
    def expected(self) -> NDArray[np.float64]:
        """C in float64."""
        c = self.problem.matrix.to_scipy().astype(np.float64) @ self.b.astype(np.float64)
        epilogue = self.problem.epilogue
        if epilogue.bias is not None:
            c = c + np.array(epilogue.bias)[:, np.newaxis]
        if self.residual is not None:
            c = c + self.residual
        return np.maximum(c, 0) if epilogue.relu else c


@st.composite
def convolutions(draw: st.DrawFn) -> Convolution:
    """Small inputs and windows, with stride, padding and dilation."""
    one, pair = st.integers(1, 3), st.tuples(st.integers(0, 3), st.integers(0, 3))
    try:
        return Convolution(
            batch=draw(one),
            channels=draw(st.integers(1, 5)),
            height=draw(st.integers(1, 9)),
            width=draw(st.integers(1, 9)),
            kernel_height=draw(st.integers(1, 5)),
            kernel_width=draw(st.integers(1, 5)),
            stride=draw(st.tuples(one, one)),
            padding=draw(pair),
            dilation=draw(st.tuples(one, one)),
        )
    except BadRequest:
        assume(False)
        raise


def drawn_matrix(m: int, k: int, density: float, seed: int) -> SparseMatrix:
    random = np.random.default_rng(seed)
    weights = np.where(random.random((m, k)) < density, random.normal(size=(m, k)), 0)
    weights[random.random(m) < 0.2] = 0  # rows without a nonzero
    return from_dense(weights.astype(np.float32))


@st.composite
def epilogues(draw: st.DrawFn, m: int) -> Epilogue:
    numbers = st.lists(st.floats(-4, 4, width=32) | st.just(0.0), min_size=m, max_size=m)
    bias = draw(st.none() | numbers)
    return epilogue_of(bias, relu=draw(st.booleans()), residual=draw(st.booleans()))


@st.composite
def layers(draw: st.DrawFn, *, splits: tuple[int, ...] = (1,), is_convolution: bool = True) -> Layer:
    """A layer of up to 20 rows, every column of it."""
    m, seed = draw(st.integers(1, 20)), draw(st.integers(0, 2**32 - 1))
    convolution = draw(convolutions()) if is_convolution else None
    k, n = (
        (draw(st.integers(1, 40)), draw(st.integers(1, 99))) if convolution is None else (convolution.k, convolution.n)
    )
    matrix = drawn_matrix(m, k, draw(st.sampled_from([0.05, 0.3, 1.0])), seed)
    problem = Problem(matrix, n, DEVICE, convolution, draw(epilogues(m)))
    rows, split = draw(st.integers(1, m)), draw(st.sampled_from(splits))
    schedule = Schedule(
        prefetch=draw(st.integers(1, 40)),
        column_group=draw(st.integers(0, 3)),
        split_k=split,
    )
    candidate = UnrolledPlan(TileSize(rows, draw(st.sampled_from([3, 32, 64]))), schedule, natural_order(matrix, rows))
    return layer_of(problem, lower(problem, candidate), seed)


def layer_of(problem: Problem, program: KernelProgram, seed: int, columns: NDArray[np.int64] | None = None) -> Layer:
    """With its input drawn."""
    random = np.random.default_rng(seed)
    columns = np.arange(problem.n) if columns is None else columns
    if problem.convolution is None:
        b = random.uniform(-1, 1, (problem.matrix.k, len(columns))).astype(np.float32)
    else:
        elements = random.uniform(-1, 1, problem.convolution.input_shape).astype(np.float32)
        b = unfold(problem.convolution, elements, columns)
    residual = random.uniform(-1, 1, (problem.matrix.m, len(columns))).astype(np.float32)
    return Layer(problem, program, columns, b, residual if problem.epilogue.residual else None)
