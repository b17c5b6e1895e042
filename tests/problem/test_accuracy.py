"""What a kernel may round in each type, and what is refused: the bound, the float64 reference, and gate.cu."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lospmm.cpu.reference import compare
from lospmm.errors import BadRequest, VerificationFailed
from lospmm.gpu import bench as measure
from lospmm.gpu import gate
from lospmm.matrix.csr import from_dense
from lospmm.problem.accuracy import ACCURACY, tolerance_of
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES, Dtype
from lospmm.problem.epilogue import Epilogue, epilogue_of
from lospmm.problem.operands import draw_b
from lospmm.problem.problem import Problem
from lospmm.settings import settings as own_settings
from lospmm.store import Store
from lospmm.toolchain.gxx import compile_shared_library
from tests.fixtures import fake_gpu
from tests.fixtures.fake_gpu import FakeDriver

relaxed = settings(deadline=None, max_examples=40)
dtypes = st.sampled_from(list(DTYPES.values()))

CONVERT = """
extern "C" void convert(const unsigned short *from, float *to, int count, int storage) {
  for (int i = 0; i < count; ++i)
    to[i] = storage == 1 ? LospmmFloat16{from[i]}.value() : LospmmBfloat16{from[i]}.value();
}
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gate") / "gate.so"
    text = fake_gpu.SHIM_HEAD + gate.gate_source() + fake_gpu.SHIM_TAIL + CONVERT
    path.write_bytes(compile_shared_library(text, header="", store=Store(own_settings().cache_dir)))
    return path


def cut(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """As tensor cores take float32 for tf32: what does not fit is cut off."""
    return (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def product(dtype: Dtype, a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """C as a kernel of this type computes it, sums one after the other in float32; before it is stored."""
    taken = cut(b) if dtype.name == "tf32" else b
    sums = np.zeros((len(a), b.shape[1]), dtype=np.float32)
    for column, row in zip(dtype.rounded(a).T, taken, strict=True):
        sums += column[:, np.newaxis] * row
    return sums


def stored(dtype: Dtype, c: NDArray[np.float32]) -> NDArray[np.float32]:
    return dtype.from_storage(dtype.to_storage(c))


def weights(m: int, k: int, density: float, seed: int, scale: float = 1.0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (np.where(rng.random((m, k)) < density, rng.normal(size=(m, k)), 0) * scale).astype(np.float32)


@relaxed
@given(dtypes, st.integers(1, 6), st.integers(1, 900), st.integers(1, 40), st.floats(0, 1), st.integers(0, 99))
def test_a_right_kernel_is_accepted_and_the_bound_holds(
    dtype: Dtype, m: int, k: int, n: int, density: float, seed: int
) -> None:
    a = weights(m, k, density, seed)
    matrix = from_dense(a)
    b = draw_b(matrix, n, seed, dtype)
    assert np.array_equal(stored(dtype, b), b)
    c = stored(dtype, product(dtype, a, b))
    compare(Problem(matrix, n, DEVICES["h200"], dtype=dtype), np.arange(n), b, c)
    accuracy, exact = ACCURACY[dtype.name], a.astype(np.float64) @ b
    scale = abs(a.astype(np.float64)) @ abs(b)
    of_product = accuracy.a_rounding + accuracy.b_rounding + accuracy.sum_rounding
    limit = of_product * scale + accuracy.c_rounding * np.maximum(abs(exact) * 1.01, accuracy.smallest_normal)
    # Below the smallest normal number of float16 a weight is off by half a spacing, whatever it is.
    limit += 2.0**-25 * np.where(a != 0, 1.0, 0.0) @ abs(b) if dtype.name == "float16" else 0
    assert (abs(c - exact) <= limit).all()


@relaxed
@given(dtypes, st.integers(1, 1500), st.integers(0, 999), st.sampled_from(["negated", "left out", "another's column"]))
def test_a_wrong_weight_is_refused(dtype: Dtype, k: int, seed: int, fault: str) -> None:
    """One weight of a row of up to 1,500, not the smallest of them, shows in some of 64 columns."""
    a = np.random.default_rng(seed).choice([-1.0, 1.0], size=(2, k)).astype(np.float32)
    a *= np.random.default_rng((seed, 1)).uniform(0.5, 1.5, size=(2, k)).astype(np.float32)
    matrix, at = from_dense(a), seed % k
    b = draw_b(matrix, 64, seed, dtype)
    wrong = a.copy()
    if fault == "another's column" and k > 1:
        wrong[1] = np.roll(wrong[1], 1)
    else:
        wrong[1, at] = -a[1, at] if fault == "negated" else 0
    problem = Problem(matrix, 64, DEVICES["h200"], dtype=dtype)
    with pytest.raises(VerificationFailed, match=r"row 1, column \d+: got"):
        compare(problem, np.arange(64), b, stored(dtype, product(dtype, wrong, b)))


@relaxed
@given(
    dtypes, st.integers(1, 7), st.integers(1, 9), st.integers(1, 300), st.floats(0, 1), st.integers(0, 99),
    st.sampled_from(["none", "element", "unwritten", "rounded down"]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_the_gate_says_what_compare_says(
    library: Path, dtype: Dtype, m: int, k: int, n: int, density: float, seed: int, fault: str, relu: bool, adds: bool
) -> None:
    a, rng = weights(m, k, density, seed), np.random.default_rng(seed)
    bias = tuple(float(number) for number in rng.normal(size=m).astype(np.float32))
    epilogue = Epilogue(bias=bias if adds else None, relu=relu, residual=adds)
    problem, driver = Problem(from_dense(a), n, DEVICES["h200"], epilogue=epilogue, dtype=dtype), FakeDriver(library)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "compile_gate", lambda _: b"gate")
        task = measure._prepare(problem, seed=3)
    bench = gate.prepare(task, driver)
    place = bench.operands
    b, c = at(place.b[0], (k, n), dtype), at(place.c[0], (m, n), dtype)
    residual = dtype.from_storage(at(place.residual[0], (m, n), dtype)) if adds else None
    values = product(dtype, a, dtype.from_storage(b))
    values += 0 if residual is None else residual + np.array(bias, np.float32)[:, np.newaxis]
    result = dtype.to_storage(np.maximum(values, 0) if relu else values)
    row, column = int(rng.integers(m)), int(rng.integers(n))
    if fault == "element":
        result[row, column] = dtype.to_storage(np.full(1, 3.0, np.float32))[0]
    elif fault == "unwritten":
        result.view(f"u{dtype.element_bytes}")[row, column] = 0xFFFFFFFF >> (32 - 8 * dtype.element_bytes)
    elif fault == "rounded down":
        result.view(f"u{dtype.element_bytes}")[...] &= ~np.array(3, f"u{dtype.element_bytes}")

    def enqueue(_: int) -> None:
        c[:] = result

    found = gate.run_and_check(bench, enqueue, copy=0)
    elements, own_b = dtype.from_storage(result), dtype.from_storage(b)
    try:
        expected = compare(problem, np.arange(n), own_b, elements, residual)
    except VerificationFailed as refused:
        assert fault != "none"
        assert found.failure is not None
        if fault == "unwritten":
            assert found.failure == f"rows not written in every column: {row}"
        else:
            same, _, error = str(refused).rpartition(", expected")
            is_as_bad = found.failure.endswith(error.rpartition("(")[2])  # two elements may be off by as much
            assert found.failure.startswith(same) or is_as_bad or "inf" in str(refused)
        return
    assert found.failure is None
    assert found.max_relative_error == pytest.approx(expected, rel=1e-6, abs=1e-12)


def at(address: int, shape: tuple[int, ...], dtype: Dtype) -> NDArray[np.generic]:
    """What lies in memory."""
    kind = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype.storage]
    size = dtype.element_bytes * int(np.prod(shape))
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype=kind).reshape(shape)


@given(m=st.integers(1, 5), n=st.integers(1, 700), changed=st.integers(0, 9), seed=st.integers(0, 99))
@relaxed
def test_differing_elements_of_16_bits_are_counted(library: Path, m: int, n: int, changed: int, seed: int) -> None:
    driver, dtype = FakeDriver(library), DTYPES["bfloat16"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "compile_gate", lambda _: b"gate")
        task = measure._prepare(Problem(from_dense(np.ones((m, 2))), n, DEVICES["h200"], dtype=dtype), seed=0)
    bench = gate.prepare(task, driver)
    place = bench.operands
    rng = np.random.default_rng(seed)
    one, other = (at(place.c[copy], (m * n,), dtype) for copy in (0, 1))
    one[:] = other[:] = rng.integers(0, 1 << 15, size=m * n)
    places = rng.choice(m * n, size=min(changed, m * n), replace=False)
    other[places] += 1
    assert gate.count_different(bench, place.c[0], place.c[1]) == len(places)


@pytest.mark.parametrize(("name", "storage"), [("float16", 1), ("bfloat16", 2)])
def test_the_gate_reads_every_number_of_16_bits(library: Path, name: str, storage: int) -> None:
    bits, read = np.arange(1 << 16, dtype=np.uint16), np.empty(1 << 16, dtype=np.float32)
    ctypes.CDLL(str(library)).convert(bits.ctypes, read.ctypes, len(bits), storage)
    dtype = DTYPES[name]
    expected = dtype.from_storage(bits.view(np.float16) if name == "float16" else bits)
    assert np.array_equal(read, expected, equal_nan=True)


def test_the_accuracy_of_a_type_is_that_of_its_unit_roundoff() -> None:
    for name, dtype in DTYPES.items():
        accuracy = ACCURACY[name]
        assert accuracy.unit_roundoff == dtype.unit_roundoff
        assert {accuracy.a_rounding, accuracy.c_rounding} <= {0.0, dtype.unit_roundoff}


def test_a_weight_beyond_the_range_of_a_type_is_refused() -> None:
    matrix = from_dense(np.array([[1.0, -7e4]]))
    Problem(matrix, 4, DEVICES["h200"], dtype=DTYPES["bfloat16"])
    with pytest.raises(
        BadRequest, match="dtype float16: A holds 70000, out of its range: choose another dtype, or scale A"
    ):
        Problem(matrix, 4, DEVICES["h200"], dtype=DTYPES["float16"])


def test_a_weight_that_rounds_to_infinity_in_tf32_is_refused() -> None:
    largest = float(np.finfo(np.float32).max)
    Problem(from_dense(np.array([[0.999 * largest]])), 4, DEVICES["h200"], dtype=DTYPES["tf32"])
    Problem(from_dense(np.array([[largest]])), 4, DEVICES["h200"])
    with pytest.raises(BadRequest, match=r"dtype tf32: A holds 3\.40282e\+38, out of its range"):
        Problem(from_dense(np.array([[largest]])), 4, DEVICES["h200"], dtype=DTYPES["tf32"])


def test_a_bias_beyond_the_range_of_a_type_is_refused() -> None:
    matrix, epilogue = from_dense(np.eye(2)), epilogue_of(np.array([1.0, -7e4]), relu=False, residual=False)
    Problem(matrix, 4, DEVICES["h200"], epilogue=epilogue, dtype=DTYPES["bfloat16"])
    with pytest.raises(BadRequest, match="dtype float16: the bias holds 70000, out of its range"):
        Problem(matrix, 4, DEVICES["h200"], epilogue=epilogue, dtype=DTYPES["float16"])


def test_weights_that_all_vanish_in_a_type_are_refused() -> None:
    matrix = from_dense(np.array([[1e-9, -2e-8]]))
    Problem(matrix, 4, DEVICES["h200"], dtype=DTYPES["bfloat16"])
    Problem(from_dense(np.array([[1e-9, 1.0]])), 4, DEVICES["h200"], dtype=DTYPES["float16"])
    with pytest.raises(
        BadRequest, match="dtype float16: the largest weight, 2e-08, rounds to 0: choose another dtype, or scale"
    ):
        Problem(matrix, 4, DEVICES["h200"], dtype=DTYPES["float16"])


@pytest.mark.parametrize("scale", [1e-3, 6e4])
def test_no_element_of_a_drawn_product_overflows(scale: float) -> None:
    a = weights(3, 400, 1.0, 1, scale / 5)
    dtype = DTYPES["float16"]
    b = draw_b(from_dense(a), 20, 0, dtype)
    assert np.isfinite(stored(dtype, product(dtype, a, b))).all()


def test_a_type_in_memory_is_not_rounded_by_a_tolerance() -> None:
    assert tolerance_of(DTYPES["float32"]).factor_rounding == tolerance_of(DTYPES["float16"]).factor_rounding == 0
    assert tolerance_of(DTYPES["tf32"]).factor_rounding == 3 * 2.0**-11


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_what_is_in_parts_is_their_sum(numbers: list[float]) -> None:
    """To 2^-22, where tensor cores take what is below the normal numbers for 0."""
    values, exact = np.array(numbers, np.float32), DTYPES["float32"]
    if exact.not_in_parts(values) is None:
        large = DTYPES["tf32"].rounded(values)
        both = large, DTYPES["tf32"].rounded(values - large)
        parts = [np.where(np.abs(part) < 2.0**-126, 0.0, part).astype(np.float64) for part in both]
        assert (np.abs(sum(parts) - values) <= 2.0**-22 * np.abs(values)).all()
    else:
        assert np.abs(values[values != 0]).min() < 2.0**-100 or np.abs(values).max() > 3.4e38
    assert DTYPES["tf32"].not_in_parts(values) is None
