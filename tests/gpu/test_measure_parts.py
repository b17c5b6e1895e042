"""What a measurement is made of: the gate's text against verify.py, copies, timing, clocks, names of errors."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lospmm.cpu import reference
from lospmm.errors import GpuFault, VerificationFailed
from lospmm.gpu import bench as measure
from lospmm.gpu import bindings, clocks, gate, operands, timing
from lospmm.gpu.messages import Prepare
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.convolution import output_elements, unfold
from lospmm.problem.device import DEVICES
from lospmm.problem.epilogue import Epilogue, bias_of
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain import elf
from lospmm.toolchain.gxx import compile_shared_library
from tests.cpu.drawn_layers import Layer, layers
from tests.fixtures import fake_gpu
from tests.fixtures.fake_gpu import FakeDriver, floats


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gate") / "gate.so"
    text = fake_gpu.SHIM_HEAD + gate.gate_source() + fake_gpu.SHIM_TAIL
    path.write_bytes(compile_shared_library(text, header="", store=Store(settings().cache_dir)))
    return path


def prepared(matrix: SparseMatrix, n: int) -> Prepare:
    return of_problem(Problem(matrix, n, DEVICES["h200"]))


def of_problem(problem: Problem) -> Prepare:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "compile_gate", lambda _: b"gate")
        return measure._prepare(problem, seed=3)


def sparse(m: int, k: int, density: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.where(rng.random((m, k)) < density, rng.normal(size=(m, k)), 0).astype(np.float32)


@hypothesis_settings(deadline=None, max_examples=60)
@given(
    m=st.integers(1, 9), k=st.integers(1, 9), n=st.integers(1, 300), density=st.floats(0, 1), seed=st.integers(0, 99),
    fault=st.sampled_from(["none", "element", "row", "nan", "infinity", "rounding"]),
)  # fmt: skip
def test_the_gate_says_what_verify_says(
    library: Path, m: int, k: int, n: int, density: float, seed: int, fault: str
) -> None:
    """``reference.compare`` is the reference: both refuse the same results, and give the same error for the others."""
    weights = sparse(m, k, density, seed)
    matrix, rng = from_dense(weights), np.random.default_rng(seed)
    problem, driver = prepared(matrix, n), FakeDriver(library)
    bench = gate.prepare(problem, driver)
    place = bench.operands
    b = floats(place.b[0], (k, n)).copy()
    result = (weights.astype(np.float64) @ b).astype(np.float32)
    row, column = int(rng.integers(m)), int(rng.integers(n))
    wrong = {"none": result[row, column], "element": 3.0, "nan": np.nan, "infinity": -np.inf}
    if fault == "row":
        result[row] = np.uint32(0xFFFFFFFF).view(np.float32)
    elif fault == "rounding":
        result = np.nextafter(result, np.float32(np.inf)) * (abs(weights).sum(axis=1) > 0)[:, None].astype(np.float32)
    else:
        result[row, column] = wrong[fault]

    def enqueue(copy: int) -> None:
        floats(place.c[copy], (m, n))[:] = result

    found = gate.run_and_check(bench, enqueue, copy=0)
    try:
        expected = reference.compare(Problem(matrix, n, DEVICES["h200"]), np.arange(n), b, result)
    except VerificationFailed as refused:
        assert found.failure is not None
        if fault in ("element", "infinity"):
            assert found.failure.startswith(f"row {row}, column {column}: got {result[row, column]}, expected")
            assert str(refused).startswith(f"row {row}, column {column}: got {result[row, column]}, expected")
        elif fault == "row":
            assert found.failure == f"rows not written in every column: {row}"
        return
    assert found.failure is None
    assert found.max_relative_error == pytest.approx(expected, rel=1e-6, abs=1e-12)


@hypothesis_settings(deadline=None, max_examples=60)
@given(layer=layers(), seed=st.integers(0, 99), fault=st.sampled_from(["none", "element", "bias", "unwritten"]))
def test_the_gate_checks_layers(library: Path, layer: Layer, seed: int, fault: str) -> None:
    """From the input as it lies in memory, against ``unfold``, which finds its elements in another way."""
    problem, driver, random = layer.problem, FakeDriver(library), np.random.default_rng(seed)
    task, matrix, n, convolution = of_problem(problem), problem.matrix, problem.n, problem.convolution
    bench = gate.prepare(task, driver)
    place = bench.operands
    assert convolution is not None
    columns = np.arange(n)
    b = unfold(convolution, floats(place.b[-1], convolution.input_shape), columns)
    where = np.add.outer(np.arange(matrix.m) * convolution.pixels, output_elements(convolution, matrix.m, columns))
    residual = floats(place.residual[-1], (matrix.m * n,))[where] if problem.epilogue.residual else None
    result = matrix.to_scipy().astype(np.float64) @ b + bias_of(problem.epilogue, np.arange(matrix.m))[:, None]
    result = result if residual is None else result + residual
    result = (np.maximum(result, 0) if problem.epilogue.relu else result).astype(np.float32)
    row, column = int(random.integers(matrix.m)), int(random.integers(n))
    changes = {"none": result[row, column], "element": result[row, column] + 9, "unwritten": np.uint32(0xFFFFFFFF)}
    if fault == "unwritten":
        result.view(np.uint32)[row, column] = changes[fault]
    elif fault == "bias":
        result[row] += 3
    else:
        result[row, column] = changes[fault]

    def enqueue(copy: int) -> None:
        floats(place.c[copy], (matrix.m * n,))[where] = result

    found = gate.run_and_check(bench, enqueue, copy=place.copies - 1)
    if fault == "none":
        assert found.failure is None
        expected = reference.compare(problem, columns, b, result, residual)
        assert found.max_relative_error == pytest.approx(expected, rel=1e-6, abs=1e-12)
        return
    assert found.failure is not None
    if fault == "unwritten":
        assert found.failure == f"rows not written in every column: {row}"
        return
    assert found.failure.startswith(f"row {row}, column ")
    with pytest.raises(VerificationFailed) as refused:
        reference.compare(problem, columns, b, result, residual)
    if fault == "element":
        said = (float(re.search(r"expected (\S+) ", str(text))[1]) for text in (found.failure, refused.value))  # type: ignore[index]
        assert next(said) == pytest.approx(next(said), rel=1e-9, abs=1e-12)


@given(m=st.integers(1, 5), n=st.integers(1, 1500), changed=st.integers(0, 20), seed=st.integers(0, 99))
@hypothesis_settings(deadline=None, max_examples=30)
def test_differing_elements_are_counted(library: Path, m: int, n: int, changed: int, seed: int) -> None:
    driver = FakeDriver(library)
    bench = gate.prepare(prepared(from_dense(np.ones((m, 2))), n), driver)
    place = bench.operands
    rng = np.random.default_rng(seed)
    one, other = (floats(place.c[copy], (m * n,)) for copy in (0, 1))
    one[:] = other[:] = rng.random(m * n)
    places = rng.choice(m * n, size=min(changed, m * n), replace=False)
    other[places] *= -1
    assert gate.count_different(bench, place.c[0], place.c[1]) == len(places)


def test_nothing_is_left_of_the_last_result(library: Path) -> None:
    """C is full of NaN before each run: a kernel that does nothing is not taken for the one before it."""
    matrix = from_dense(sparse(6, 7, 0.5, 1))
    problem, driver = prepared(matrix, 40), FakeDriver(library)
    bench = gate.prepare(problem, driver)
    place = bench.operands

    def right(copy: int) -> None:
        floats(place.c[copy], (6, 40))[:] = matrix.to_scipy() @ floats(place.b[copy], (7, 40))

    assert gate.run_and_check(bench, right, copy=0).failure is None
    idle = gate.run_and_check(bench, lambda _: None, copy=0)
    assert idle.failure == "rows not written in every column: 0, 1, 2, 3, 4, 5"
    assert idle.max_relative_error == np.inf


def test_a_result_that_passed_is_known_again(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, and of the same problem; what is not is checked."""
    matrix = from_dense(sparse(6, 7, 0.5, 1))
    problem, driver = prepared(matrix, 40), FakeDriver(library)
    bench, checked = gate.prepare(problem, driver), gate._checked
    place = bench.operands
    count = 0

    def counted(*given: Any) -> gate.GateVerdict:
        nonlocal count
        count += 1
        return checked(*given)

    monkeypatch.setattr(gate, "_checked", counted)
    right = (matrix.to_scipy().astype(np.float64) @ floats(place.b[0], (7, 40))).astype(np.float32)

    def verdict(result: np.ndarray, of: Prepare = problem, copy: int = 0) -> tuple[gate.GateVerdict, int]:
        def enqueue(copy: int) -> None:
            floats(place.c[copy], (6, 40))[:] = result

        before = count
        return gate.run_and_check(replace(bench, problem=of), enqueue, copy=copy), count - before

    first, checks_of_first = verdict(right)
    assert (first.failure, checks_of_first) == (None, 1)
    assert verdict(right) == (first, 0) == verdict(right, copy=place.copies - 1)
    assert verdict(right, replace(problem, epilogue=Epilogue(relu=True)))[1] == 1
    wrong = right.copy()
    wrong[3, 5] += 1
    assert verdict(wrong)[0].failure and verdict(wrong)[1] == 1, "what failed is not kept"
    others = [right * np.float32(1 + 2.0**-23 * number) for number in range(1, operands.KEPT + 1)]
    assert [verdict(other)[1] for other in (*others, *others)] == [1] * len(others) + [0] * len(others)
    assert verdict(right) == (first, 1), "there is room for so many"
    assert sorted(one.address for one in bench.passed) == sorted(place.kept)


def test_results_are_kept_where_there_is_room(library: Path) -> None:
    problem = prepared(from_dense(sparse(6, 7, 0.5, 1)), 40)
    size = sum(-(-4 * rows * 40 // 256) * 256 for rows in (6, 7))
    held = problem.matrix
    fixed = held.indptr.nbytes + held.indices.nbytes + held.data.nbytes + 20 * 6
    driver = FakeDriver(library, l2_bytes=0, free_bytes=operands.RESERVE_BYTES + fixed + 2 * size)
    bench = gate.prepare(problem, driver)
    place = bench.operands
    assert (place.copies, place.kept) == (2, ())
    matrix = from_dense(sparse(6, 7, 0.5, 1)).to_scipy().astype(np.float64)

    def enqueue(copy: int) -> None:
        floats(place.c[copy], (6, 40))[:] = matrix @ floats(place.b[copy], (7, 40))

    assert gate.run_and_check(bench, enqueue, copy=0).failure is None
    assert bench.passed == []


def test_the_gate_compiles_for_a_gpu() -> None:
    cubin = measure.compile_gate("sm_90")
    for entry in (gate.CHECK_ENTRY, gate.DIFFER_ENTRY):
        usage = elf.kernel_usage(cubin, entry)
        assert usage.registers <= gate.REGISTERS
        assert usage.stack_bytes == 0


def test_copies_are_together_beyond_twice_the_cache() -> None:
    l2 = 60 << 20
    assert timing.copies_beyond_l2(25 << 20, l2) == 5
    assert timing.copies_beyond_l2((120 << 20) + 1, l2) == 1
    assert timing.copies_beyond_l2(0, l2) == timing.copies_beyond_l2(1, l2) == timing.MAX_COPIES
    for size in (1 << 15, 1 << 20, 120 << 20):
        assert 2 * l2 < size * timing.copies_beyond_l2(size, l2) <= 2 * l2 + size


def test_b_is_the_same_in_every_copy_and_repeats_beyond_its_period(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operands, "DRAWN", 101)
    problem, driver = prepared(from_dense(np.ones((2, 9))), 37), FakeDriver(library)
    bench = gate.prepare(problem, driver)
    place = bench.operands
    assert place.copies >= 2
    first = floats(place.b[0], (9, 37))
    assert len(place.drawn) == 101
    assert abs(first).max() <= 1
    for address in place.b:
        assert address % 256 == 0
        assert np.array_equal(floats(address, (9, 37)), first)
    rows = np.arange(9, dtype=np.int32)
    assert all(np.array_equal(operands.elements_of_b(place, problem, rows, j), first[:, j]) for j in range(37))


def test_the_period_of_b_is_prime() -> None:
    assert all(operands.DRAWN % divisor for divisor in range(2, int(operands.DRAWN**0.5) + 1))


def test_large_weights_make_small_b() -> None:
    matrix = from_dense(np.full((2, 3), 3e38))
    problem = prepared(matrix, 5)
    assert problem.exponent == -3
    assert np.isfinite(np.float32(3e38) * operands.draw(problem).astype(np.float64).max() * 3)
    assert prepared(from_dense(np.ones((2, 3))), 5).exponent == 0
    assert prepared(from_dense(np.zeros((2, 3))), 5).exponent == 0


def test_too_large_a_problem_is_refused_with_what_it_needs(library: Path) -> None:
    problem = prepared(from_dense(np.ones((2, 3))), 10_000_000)
    driver = FakeDriver(library, free_bytes=operands.RESERVE_BYTES + (200 << 20))
    with pytest.raises(GpuFault, match=r"1 of each, take 0.2 GiB; 0.2 GiB are free on a fake GPU"):
        operands.allocate(FakeDriver(library, free_bytes=operands.RESERVE_BYTES + (190 << 20)), problem)
    assert operands.allocate(driver, problem).copies == 1


def test_a_second_copy_is_made_where_there_is_room(library: Path) -> None:
    problem = prepared(from_dense(np.ones((2, 3))), 1000)
    assert operands.allocate(FakeDriver(library), problem).copies == 2


def enqueue_into(calls: list[int], driver: FakeDriver) -> Callable[[int], None]:
    function = driver.load(fake_gpu.kernel("zeros", np.ones((1, 1), dtype=np.float32), 1), "kernel")
    place = driver.allocate(8)

    def enqueue(copy: int) -> None:
        calls.append(copy)
        driver.launch(function, Launch((1, 1, 1), 1), (np.uint64(place), np.uint64(place + 4)))

    return enqueue


@pytest.mark.parametrize(("copies", "launches"), [(1, 20), (3, 21), (20, 20), (50, 50)])
def test_a_replay_holds_whole_rounds_of_the_copies(copies: int, launches: int) -> None:
    calls: list[int] = []
    driver = FakeDriver()
    timed = timing.time_rotating(driver, enqueue_into(calls, driver), copies=copies)
    assert calls == [0, *(number % copies for number in range(launches))]
    assert timed.replays == timing.REPLAYS
    assert timed.micros == pytest.approx(10.0 + 1 / launches, rel=0.01)
    assert driver.discarded == 1
    assert driver.replays >= timing.REPLAYS + timing.WARM_REPLAYS
    assert driver.replays * 10.0 * launches >= timing.WARM_MICROS


def test_a_fault_while_timing_leaves_no_graph() -> None:
    driver = FakeDriver()
    enqueue = enqueue_into([], driver)
    driver.replay_micros = lambda _: driver.check() or 1.0  # type: ignore[method-assign,func-returns-value]

    def last(copy: int) -> None:
        enqueue(copy)
        if copy == 1:
            driver.lost = fake_gpu.ILLEGAL

    with pytest.raises(GpuFault, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        timing.time_rotating(driver, last, copies=2)


@given(st.lists(st.floats(0.5, 1e6), min_size=2, max_size=30))
def test_median_and_spread(micros: list[float]) -> None:
    timed = timing.timing_of(micros)
    assert timed.micros == pytest.approx(float(np.median(micros)))
    low, high = np.percentile(micros, [25, 75])
    assert timed.spread == pytest.approx((high - low) / timed.micros, abs=1e-9)


def test_reasons_of_slow_clocks_have_names() -> None:
    assert clocks.reasons_of(0) == ()
    assert clocks.reasons_of(0b100100) == ("power cap", "software thermal slowdown")
    assert clocks.reasons_of(1 << 40) == ("reason 40",)


def test_without_nvml_there_are_no_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise OSError("no such library")

    clocks._nvml.cache_clear()
    monkeypatch.setattr(clocks.ctypes, "CDLL", missing)
    assert clocks.read_clocks("0000:1b:00.0") is None


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("CUDA_ERROR_NO_DEVICE: no CUDA-capable device", "CUDA_ERROR_NO_DEVICE: no CUDA-capable device"),
        ("while loading:\nCUDA_ERROR_INVALID_IMAGE: bad", "CUDA_ERROR_INVALID_IMAGE: bad"),
        ("cuMemAlloc failed: out of memory", "CUDA_ERROR_OUT_OF_MEMORY: out of memory (cuMemAlloc)"),
        ("cuMemAlloc failed: out of memory - ", "CUDA_ERROR_OUT_OF_MEMORY: out of memory (cuMemAlloc)"),
        ("something else", "something else"),
    ],
)
def test_errors_have_the_drivers_names(message: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "_names_by_text", lambda: {"out of memory": "CUDA_ERROR_OUT_OF_MEMORY"})
    with pytest.raises(GpuFault) as caught, bindings.faults_named():
        raise ValueError(message)
    assert str(caught.value) == named


@pytest.mark.parametrize(("micros", "launches"), [(10.0, 20), (25_000.0, 20), (100_000.0, 5), (3e6, 1), (0.0, 20)])
def test_what_is_slow_is_launched_fewer_times(micros: float, launches: int) -> None:
    assert timing.fewer_if_slow(20, micros) == launches
