"""Kernels of pairs of 16-bit numbers: they run without a hazard and compute what rounding after every step gives."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import lower
from lospmm.codegen.sass.emit import emit
from lospmm.codegen.sass.form import Opcode
from lospmm.codegen.sass.half import PRODUCTS, packed
from lospmm.codegen.sass.machine import MachineCode
from lospmm.cpu.geometry import Run, geometry_of
from lospmm.cpu.rounding import bfloat_multiply_add, half_multiply_add
from lospmm.cpu.sass_machine import execute
from lospmm.errors import Unsupported, VerificationFailed
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.device import find_device
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import regroup
from lospmm.tuning.build import for_emitter
from lospmm_datasets.synthetic import uniform

FUSED = {"float16": half_multiply_add, "bfloat16": bfloat_multiply_add}
every_number = pytest.mark.parametrize("number", PRODUCTS)


def kernel_of(matrix: SparseMatrix, n: int, schedule: Schedule, number: str) -> tuple[KernelProgram, MachineCode]:
    """The program over words and its machine code over pairs."""
    problem = for_emitter(Problem(matrix, n // 2, find_device("h200")), "sass")
    tile = TileSize(5, 32)
    program = lower(problem, UnrolledPlan(tile, schedule, regroup(matrix, [tile.rows])[tile.rows]))
    machine = emit(program, "sm_90").machine
    assert machine is not None
    return program, packed(machine, DTYPES[number])


def pairs(values: NDArray[np.float32], number: str) -> NDArray[np.float32]:
    """Words of two neighbouring columns each, as the float32 that the machine moves."""
    return np.ascontiguousarray(DTYPES[number].to_storage(values)).view(np.float32)


@every_number
@pytest.mark.parametrize("schedule", [Schedule(1), Schedule(8), Schedule(4), Schedule(8, split_k=2)])
def test_a_kernel_rounds_after_every_multiply_add(number: str, schedule: Schedule) -> None:
    matrix = uniform(13, 24, 0.6, seed=3)
    rng = np.random.default_rng(1)
    b = pairs(rng.uniform(-1, 1, (24, 64)).astype(np.float32), number)
    program, code = kernel_of(matrix, 64, schedule, number)
    c = execute(code, Run(geometry_of(program, cols=32), np.arange(32), b)).view(np.uint32)
    weights = DTYPES[number].to_storage(matrix.data).view(np.uint16).astype(np.uint32)
    if schedule.split_k > 1:  # sums of parts: another order
        dense = np.zeros((13, 24))
        dense[np.repeat(np.arange(13), np.diff(matrix.indptr)), matrix.indices] = floats(weights, number)
        found, exact = floats(halves_of(c), number), dense @ floats(halves_of(b.view(np.uint32)), number)
        np.testing.assert_allclose(found, exact, atol=20 * {"float16": 2**-11, "bfloat16": 2**-8}[number])
        return
    for row in range(13):
        total = np.zeros(32, np.uint32)
        for at in range(matrix.indptr[row], matrix.indptr[row + 1]):
            twice = int(weights[at] << np.uint32(16) | weights[at])
            total = FUSED[number](twice, b[matrix.indices[at]].view(np.uint32), total)
        np.testing.assert_array_equal(c[row], total)


def halves_of(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The bits of each column, (rows, columns)."""
    return np.ascontiguousarray(words).view(np.uint16).astype(np.uint32)


def floats(bits: NDArray[np.uint32], number: str) -> NDArray[np.float64]:
    return np.array([as_float(int(one), number) for one in bits.flat]).reshape(bits.shape)


def rounded(value: Fraction, digits: int, least: int) -> Fraction:
    """To the nearest multiple of the last of ``digits`` binary digits, at least 2^``least``, ties to even."""
    if value == 0:
        return value
    exponent = least
    while abs(value) >= Fraction(2) ** (exponent + digits):
        exponent += 1
    unit = Fraction(2) ** exponent
    return round(value / unit) * unit


@given(st.tuples(*[st.integers(0, 0xFFFF)] * 3))
@example((0x7F81, 0x3F80, 0x3F80))  # bfloat16: a NaN that signals
@example((0x3F80, 0x7F81, 0xFFA0))
@example((0x3C00, 0x7C01, 0x3C00))  # float16
@example((0x7C01, 0xFC01, 0x7D00))
@every_number
def test_one_rounding(number: str, bits: tuple[int, int, int]) -> None:
    words = [np.array([value | value << 16], np.uint32) for value in bits]
    found = FUSED[number](int(words[0][0]), words[1], words[2])
    numbers = [as_float(value, number) for value in bits]
    got = as_float(int(found[0] & 0xFFFF), number)
    if not all(map(np.isfinite, numbers)):
        return
    weight, x, before = map(Fraction, numbers)
    digits, least, largest = (11, -24, 65504.0) if number == "float16" else (8, -133, float(2.0**127 * (2 - 2**-7)))
    exact = rounded(weight * x + before, digits, least)
    assert got == (exact if abs(exact) <= largest else np.copysign(np.inf, float(np.sign(float(exact > 0) - 0.5))))


def as_float(bits: int, number: str) -> float:
    if number == "float16":
        return float(np.uint16(bits).view(np.float16))
    return float(np.uint32(bits << 16).view(np.float32))


@every_number
def test_a_sum_read_as_soon_as_one_of_float32_is_refused(number: str) -> None:
    """Stalls are longer: without them the interpreter refuses."""
    matrix = uniform(5, 24, 0.0, seed=3)
    program, code = kernel_of(matrix, 64, Schedule(8), number)
    form = code.form.copy()
    fmas = form["op"] == PRODUCTS[number]
    form["stall"][fmas] = 1
    b = pairs(np.ones((24, 64), np.float32), number)
    with pytest.raises(VerificationFailed, match="after HFMA2"):
        execute(replace(code, form=form), Run(geometry_of(program, cols=32), np.arange(32), b))


def test_only_products_have_16_bits() -> None:
    program, code = kernel_of(uniform(5, 24, 0.5, seed=0), 64, Schedule(8), "float16")
    form = code.form.copy()
    form["op"][np.argmax(form["op"] == Opcode.EXIT)] = Opcode.FMNMX_NAN
    with pytest.raises(Unsupported, match="FMNMX_NAN of pairs of float16"):
        packed(replace(code, form=form), DTYPES["float16"])
    assert program.n == 32
    with pytest.raises(Unsupported, match="pairs of tf32: known are float16, bfloat16"):
        packed(code, DTYPES["tf32"])
