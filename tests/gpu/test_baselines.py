"""The libraries beside the kernel, called through ctypes: here a C library with their prototypes, on the CPU."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lospmm.errors import GpuFault
from lospmm.gpu import libraries as baselines
from lospmm.gpu.gate import GateVerdict
from lospmm.gpu.libraries import (
    BASELINES,
    Baseline,
    BaselineTime,
    VariantTime,
    baselines_of,
    cublas,
    cublaslt,
    cusparselt,
    eight_bits,
    library,
    sputnik,
    time_baseline,
)
from lospmm.gpu.libraries.library import Buffers, LibraryFault, LibraryTask, Variants, load
from lospmm.gpu.timing import Timing
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.accuracy import SUM_ROUNDING, weights_held_to
from lospmm.problem.dtype import DTYPES, FLOAT32, Dtype
from lospmm.problem.values import VALUE_TYPES

STREAM = 0x7F00_1234_5678  # beyond 32 bits, as addresses are


class HostDriver:
    """Memory of the host in place of a GPU's. ``blocks`` is what was allocated and not freed."""

    name, stream = "host", STREAM

    def __init__(self, free_bytes: int = 1 << 30) -> None:
        self.blocks: dict[int, Any] = {}
        self.free_bytes = free_bytes
        self.waits = 0

    def allocate(self, size: int) -> int:
        if size > self.free_bytes:
            raise GpuFault("CUDA_ERROR_OUT_OF_MEMORY: cuMemAlloc")
        assert size > 0
        block = ctypes.create_string_buffer(size)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int) -> None:
        del self.blocks[address]

    def upload(self, address: int, array: NDArray[Any]) -> None:
        assert array.flags.c_contiguous
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def download(self, array: NDArray[Any], address: int) -> None:
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def synchronize(self) -> None:
        self.waits += 1

    def fill(self, address: int, word: int, count: int) -> None:
        ctypes.memmove(address, np.full(count, word, dtype=np.uint32).ctypes.data, 4 * count)

    def l2_bytes(self) -> int:
        return 1000

    def unused(self, *_: object) -> Any:
        raise AssertionError("a baseline has no business here")

    device_name = memory_bytes = bus_id = unused
    load = unload = launch = capture = replay_micros = discard = close = unused


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the C library."""
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("no gcc")
    target = tmp_path_factory.mktemp("fake") / "libfake.so"
    source = Path(__file__).parents[1] / "fixtures" / "fake_libraries.c"
    command = [compiler, "-shared", "-fPIC", "-O1", f"-DSTREAM={STREAM:#x}", "-o", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return str(target)


@pytest.fixture
def installed(fake: str, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Every library is the fake one."""
    monkeypatch.setattr(library, "find", lambda _name: fake)
    functions = ctypes.CDLL(fake)
    functions.fake_refuse(0)
    return functions


def drawn(m: int, k: int, density: float, seed: int = 0) -> SparseMatrix:
    rng = np.random.default_rng(seed)
    return from_dense(np.where(rng.random((m, k)) < density, rng.normal(size=(m, k)), 0))


class Problem:
    """Copies of B with different values, C poisoned, and what the gate and the clock of a worker do."""

    def __init__(
        self,
        matrix: SparseMatrix,
        n: int,
        copies: int = 2,
        sputnik: Path | None = None,
        dtype: Dtype = FLOAT32,
        copies_of_a: int = 1,
        is_searched: bool = False,
    ) -> None:
        self.driver = HostDriver()
        rng = np.random.default_rng(1)
        self.b = dtype.to_storage(rng.uniform(-1, 1, size=(copies, matrix.k, n)).astype(np.float32))
        self.c = dtype.to_storage(np.full((copies, matrix.m, n), np.nan, dtype=np.float32))
        places = [Buffers(b.ctypes.data, c.ctypes.data) for b, c in zip(self.b, self.c, strict=True)]
        self.place = LibraryTask(self.driver, matrix, n, places, sputnik, dtype, copies_of_a, is_searched=is_searched)
        self.timed = 0

    def check(
        self, enqueue: Callable[[int], None], limit: float | None, multiplied: SparseMatrix | None
    ) -> GateVerdict:
        """Of every copy, so that a library which always takes the first is found out."""
        dtype, matrix = self.place.dtype, multiplied or self.place.matrix
        a = matrix.to_scipy().astype(np.float64)
        a.data = weights_held_to(dtype, matrix).astype(np.float64)
        worst = 0.0
        for copy, (b, c) in enumerate(zip(self.b, self.c, strict=True)):
            c.view(np.uint8)[:] = 0xFF
            enqueue(copy)
            own_b, own_c = (dtype.from_storage(array).astype(np.float64) for array in (b, c))
            scale = abs(a) @ abs(own_b)
            worst = max(worst, float(np.max(np.abs(own_c - a @ own_b) / np.maximum(scale, 1e-30), initial=0.0)))
        if not np.isfinite(worst):
            return GateVerdict(None, "rows not written")
        allowed = SUM_ROUNDING if limit is None else limit
        return GateVerdict(worst, None if worst <= allowed else f"{worst:.1e}, at most {allowed:.1e} allowed")

    def time(self, enqueue: Callable[[int], None]) -> Timing:
        enqueue(0)
        self.timed += 1
        return Timing(10.0 - self.timed, 0.01, 15)

    def run(self, name: str) -> BaselineTime:
        return time_baseline(name, self.place, check=self.check, time=self.time)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["cusparse", "cublas_fp32", "sputnik"])
def test_launches_take_turns_at_copies_of_a(fake: str, name: str) -> None:
    """Three copies of A and five of B: each product is right, and no less is held than the three."""
    matrix = drawn(17, 9, 0.3)
    alone, streamed = (Problem(matrix, 6, copies=5, sputnik=Path(fake), copies_of_a=count) for count in (1, 3))
    held = {}
    for count, problem in ((1, alone), (3, streamed)):

        def time(enqueue: Callable[[int], None], problem: Problem = problem, count: int = count) -> Timing:
            held[count] = sum(map(len, problem.driver.blocks.values()))
            return problem.time(enqueue)

        found = time_baseline(name, problem.place, check=problem.check, time=time)
        assert found.failure is None
        assert not problem.driver.blocks
    assert held[3] - held[1] >= 2 * 4 * matrix.nnz


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (dtype, name)
        for dtype in DTYPES.values()
        for name in baselines_of(dtype)
        if not name.startswith("cusparselt")  # which takes few shapes, and its own A
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("matrix", "n"),
    [
        (drawn(17, 9, 0.3), 13),
        (drawn(1, 40, 0.5), 1),
        (drawn(40, 1, 0.5), 5),
        (from_dense(np.zeros((6, 5), dtype=np.float32)), 4),
    ],
    ids=["ragged", "one row, one column", "k is 1", "no nonzero"],
)
def test_every_baseline_computes_the_product(
    installed: ctypes.CDLL, fake: str, dtype: Dtype, name: str, matrix: SparseMatrix, n: int
) -> None:
    before = installed.fake_alive()
    problem = Problem(matrix, n, sputnik=Path(fake), dtype=dtype)
    found = problem.run(name)
    assert found.failure is None
    assert found.best is not None
    assert found.micros == found.best.micros
    assert all(variant.max_relative_error is not None for variant in found.variants)
    limit = BASELINES[name].limit(dtype) or SUM_ROUNDING
    assert max(variant.max_relative_error or 0 for variant in found.variants) <= limit
    assert found.library is not None
    assert found.library.endswith("(libfake.so)")
    assert not problem.driver.blocks  # all device memory was freed,
    assert installed.fake_alive() == before  # and every handle and descriptor destroyed
    assert problem.driver.waits


@pytest.mark.parametrize("dtype", [DTYPES["float16"], DTYPES["bfloat16"]], ids=str)
@pytest.mark.parametrize(("name", "values"), [("cublas_int8", "int8"), ("cublas_fp8", "fp8_e4m3")])
@pytest.mark.parametrize("n", [1, 24, 48])
def test_8_bit_products_of_every_padding(installed: ctypes.CDLL, dtype: Dtype, name: str, values: str, n: int) -> None:
    matrix = drawn(80, 32, 0.3)
    matrix = replace(matrix, data=weights_held_to(dtype, matrix, VALUE_TYPES[values]))
    problem = Problem(matrix, n, dtype=dtype, copies=5, copies_of_a=2, is_searched=True)
    found = problem.run(name)
    assert (found.failure, found.library) == (None, "cuBLASLt 13.0.2 (libfake.so)")
    widths = {1: (1, 16, 32), 24: (24, 32), 48: (48,)}[n]
    titles = {
        width: "cuBLASLt" if width == n else f"N padded to {width}, cuBLASLt"
        for width in widths
        if values != "int8" or width > 16  # of int8 the library takes no less
    }
    assert [way.name for way in found.variants] == [f"{one} {at}" for one in titles.values() for at in (1, 2)]
    assert all((way.max_relative_error == 0) == (values == "int8") for way in found.variants)
    assert installed.fake_alive() == 0 and not problem.driver.blocks


@pytest.mark.parametrize("values", VALUE_TYPES)
def test_8_bit_codes_are_those_of_the_weights(values: str) -> None:
    kind, matrix = VALUE_TYPES[values], drawn(40, 300, 0.7)
    held = replace(matrix, data=kind.held(matrix)).dense_rows(0, 40)
    found = kind.decoded[eight_bits.storing(kind)(held).astype(int) + kind.zero & 0xFF]
    assert found[matrix.dense_rows(0, 40) != 0].tolist() == kind.decoded[kind.codes(matrix)].tolist()
    assert not found[matrix.dense_rows(0, 40) == 0].any()


def test_a_wrong_8_bit_product_is_not_timed(installed: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(*own: Any, **named: Any) -> cublaslt.DenseProduct:
        return cublaslt.DenseProduct(*own, **named)._replace(alpha=ctypes.c_int32(2))

    monkeypatch.setattr(eight_bits, "DenseProduct", twice)
    problem = Problem(drawn(16, 16, 0.5), 48, dtype=DTYPES["float16"])
    assert "at most 2e-03 allowed" in str(problem.run("cublas_int8").failure)
    assert installed.fake_alive() == 0 and not problem.timed


@pytest.mark.parametrize(("m", "k"), [(24, 32), (32, 24)])
def test_shapes_that_8_bits_do_not_take(m: int, k: int) -> None:
    found = Problem(drawn(m, k, 0.5), 8, dtype=DTYPES["float16"]).run("cublas_fp8")
    assert found.failure == "takes m and k in multiples of 16"


def test_the_better_algorithm_of_cusparse_is_kept_with_its_name(installed: ctypes.CDLL) -> None:
    before = installed.fake_preprocessed()
    found = Problem(drawn(8, 8, 0.5), 8, copies=5).run("cusparse")
    assert [variant.name for variant in found.variants] == ["CSR_ALG2", "CSR_ALG3"]
    assert found.library == "cuSPARSE 12.6.3 (libfake.so)"
    assert found.best == found.variants[1]  # the clock of these tests gives the second less time
    assert installed.fake_preprocessed() - before == 2  # once for each algorithm, not for each copy


def test_an_algorithm_that_is_refused_leaves_the_other(installed: ctypes.CDLL) -> None:
    installed.fake_refuse(12)
    found = Problem(drawn(8, 8, 0.5), 8).run("cusparse")
    assert found.failure is None
    assert found.best is not None
    assert found.best.name == "CSR_ALG2"
    assert found.variants[1] == VariantTime(
        "CSR_ALG3", None, None, "cusparseSpMM_bufferSize: CUSPARSE_STATUS_NOT_SUPPORTED"
    )


@pytest.mark.usefixtures("installed")
def test_tf32_needs_its_own_tolerance() -> None:
    problem = Problem(drawn(12, 64, 0.4), 40)
    found = problem.run("cublas_tf32")
    assert found.best is not None
    assert found.best.max_relative_error is not None
    assert found.best.max_relative_error > SUM_ROUNDING
    exact = problem.run("cublas_fp32").best
    assert exact is not None
    assert exact.max_relative_error is not None
    assert exact.max_relative_error < 1e-6
    assert found.library == "cuBLAS 13.0.2 (libfake.so)"


@pytest.mark.parametrize("name", ["cublas_fp32", "cublas_tf32", "cublas_fp16", "cublas_bf16"])
def test_a_search_times_every_algorithm_that_cublaslt_can_start(installed: ctypes.CDLL, name: str) -> None:
    dtype = DTYPES[BASELINES[name].dtypes[0]]
    problem = Problem(drawn(12, 20, 0.4), 7, dtype=dtype, copies=3, copies_of_a=2, is_searched=True)
    found = problem.run(name)
    title = name.removeprefix("cublas_").replace("tf", "TF")
    assert [way.name for way in found.variants] == [title, f"{title}, cuBLASLt 1", f"{title}, cuBLASLt 2"]
    assert all(way.timing is not None for way in found.variants) and found.micros == 7.0  # each is faster than before
    assert installed.fake_alive() == 0 and not problem.driver.blocks

    installed.fake_refuse(3)
    refused = problem.run(name).variants[2]
    assert (refused.timing, refused.failure) == (None, "cublasLtMatmul: CUBLAS_STATUS_NOT_SUPPORTED")


@given(weights=st.lists(st.integers(-3, 3), min_size=16, max_size=16), rows=st.sampled_from([1, 2, 4]))
def test_pruning_keeps_the_two_largest_of_four(weights: list[int], rows: int) -> None:
    matrix = from_dense(np.array(weights, dtype=np.float32).reshape(rows, -1))
    found = cusparselt.prune(matrix)
    for before, after in zip(*(one.dense_rows(0, rows).reshape(-1, 4) for one in (matrix, found)), strict=True):
        kept = np.argsort(-abs(before), kind="stable")[:2]
        assert after.tolist() == [weight if place in kept else 0 for place, weight in enumerate(before)]
    assert cusparselt.prune(found) == found
    assert 0 not in found.data


@pytest.mark.parametrize("dtype", [DTYPES["float16"], DTYPES["bfloat16"]], ids=str)
@pytest.mark.parametrize("density", [0.8, 0.1, 0.0])
@pytest.mark.parametrize("is_exact", [False, True])
def test_cusparselt_multiplies_the_pruned_matrix(
    installed: ctypes.CDLL, dtype: Dtype, density: float, is_exact: bool
) -> None:
    matrix = drawn(32, 64, density)
    matrix = cusparselt.prune(matrix) if is_exact else matrix
    is_exact = is_exact or density == 0
    problem = Problem(matrix, 24, dtype=dtype, copies=5, copies_of_a=2)
    found = problem.run("cusparselt_fp16" if dtype.name == "float16" else "cusparselt_bf16")
    assert (found.failure, found.library) == (None, "cuSPARSELt 0.8.0 (libfake.so)")
    assert [way.name for way in found.variants] == [cusparselt.EXACT if is_exact else cusparselt.PRUNED]
    error = np.max(np.abs(dtype.from_storage(problem.c[1]) - matrix.to_scipy() @ dtype.from_storage(problem.b[1])))
    assert (error < 0.1) == is_exact  # of the product of A itself
    assert installed.fake_alive() == 0 and not problem.driver.blocks


@pytest.mark.parametrize(("m", "k", "n"), [(24, 32, 8), (16, 40, 8), (16, 32, 1)])
def test_shapes_that_cusparselt_does_not_take(installed: ctypes.CDLL, m: int, k: int, n: int) -> None:
    found = Problem(drawn(m, k, 0.5), n, dtype=DTYPES["float16"]).run("cusparselt_fp16")
    assert found.failure == "takes m and k in multiples of 16 and n in multiples of 8"
    assert installed.fake_alive() == 0


def test_what_cusparselt_made_is_released_when_its_search_fails(installed: ctypes.CDLL) -> None:
    installed.fake_refuse(24)
    problem = Problem(drawn(16, 32, 0.5), 8, dtype=DTYPES["float16"])
    assert problem.run("cusparselt_fp16").failure == "cusparseLtMatmulSearch: CUSPARSE_STATUS_NOT_SUPPORTED"
    assert installed.fake_alive() == 0 and not problem.driver.blocks


@pytest.mark.usefixtures("installed")
def test_tf32_in_place_of_fp32_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NVIDIA_TF32_OVERRIDE=1 does."""
    monkeypatch.setattr(
        baselines,
        "BASELINES",
        {
            **BASELINES,
            "cublas_fp32": Baseline("", partial(cublas.prepare, compute=cublas.COMPUTE_32F_FAST_TF32, name="fp32")),
        },
    )
    found = Problem(drawn(12, 64, 0.4), 40).run("cublas_fp32")
    assert found.best is None
    assert found.micros is None
    assert "at most 1.0e-05 allowed" in str(found.failure)


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (GateVerdict(None, "rows not written"), VariantTime("way", None, None, "rows not written")),
        (GateVerdict(float("inf"), "row 1 is wrong"), VariantTime("way", None, None, "row 1 is wrong")),
        (GateVerdict(0.5, "row 1 is wrong"), VariantTime("way", None, 0.5, "row 1 is wrong")),
    ],
)
def test_what_is_wrong_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, verdict: GateVerdict, expected: VariantTime
) -> None:
    @contextmanager
    def prepared(_place: LibraryTask) -> Iterator[Variants]:
        yield Variants("it", {"way": lambda _copy: None})

    problem = Problem(drawn(3, 3, 0.5), 2)
    monkeypatch.setattr(baselines, "BASELINES", {"it": Baseline("It", prepared)})
    found = time_baseline("it", problem.place, check=lambda *_: verdict, time=problem.time)
    assert found == BaselineTime("it", "it", (expected,), f"way: {verdict.failure}")
    assert found.best is None
    assert problem.timed == 0


def test_a_missing_library_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> Any:
        raise RuntimeError(f"looked for {name}\nin many folders")

    monkeypatch.setattr("cuda.pathfinder.load_nvidia_dynamic_lib", nowhere)
    problem = Problem(drawn(3, 3, 0.5), 2)
    assert problem.run("cusparse").failure == (
        "libcusparse is not installed; pip install nvidia-cusparse, or a CUDA toolkit"
    )
    assert problem.run("cublas_tf32").failure == (
        "libcublas is not installed; pip install nvidia-cublas, or a CUDA toolkit"
    )
    half = Problem(drawn(16, 16, 0.5), 8, dtype=DTYPES["float16"])
    assert half.run("cusparselt_fp16").failure == ("libcusparseLt is not installed; pip install nvidia-cusparselt-cu13")
    assert problem.run("sputnik").failure == (
        "no library is named; build one and name it with --sputnik (docs/benchmarking.md)"
    )
    assert not problem.driver.blocks


def test_a_library_that_is_none(fake: str, tmp_path: Path) -> None:
    text = tmp_path / "libtext.so"
    text.write_text("not a library")
    assert "cannot be loaded" in str(Problem(drawn(3, 3, 0.5), 2, sputnik=text).run("sputnik").failure)
    assert "cannot be loaded" in str(Problem(drawn(3, 3, 0.5), 2, sputnik=tmp_path / "no").run("sputnik").failure)
    with pytest.raises(LibraryFault, match="has no function sputnik_cuda_spmv"):
        load(fake, {"sputnik_cuda_spmv": ()}, "cublasGetStatusName")


@pytest.mark.usefixtures("installed")
def test_a_dense_matrix_that_is_too_large_is_not_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(drawn(8, 8, 0.5), 2)
    monkeypatch.setattr(cublas, "MAX_DENSE_BYTES", 8 * 8 * 4 - 1)
    assert problem.run("cublas_fp32").failure == "dense A takes 256 bytes, over 255"
    monkeypatch.setattr(cublas, "MAX_DENSE_BYTES", 8 * 8 * 4)
    monkeypatch.setattr(cublas, "PIECE_BYTES", 3 * 8 * 4)  # pieces of 3, 3 and 2 rows
    assert problem.run("cublas_fp32").failure is None


def test_what_was_made_is_released_when_memory_runs_out(installed: ctypes.CDLL) -> None:
    before = installed.fake_alive()
    problem = Problem(drawn(8, 8, 0.5), 2)
    problem.driver.free_bytes = 1000  # less than the workspaces
    for name in ("cusparse", "cublas_fp32"):
        with pytest.raises(GpuFault, match="OUT_OF_MEMORY"):
            problem.run(name)
    assert installed.fake_alive() == before
    assert not problem.driver.blocks


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_rows_for_sputnik_come_longest_first(lengths: list[int]) -> None:
    weights = np.zeros((len(lengths), 5), dtype=np.float32)
    for row, length in enumerate(lengths):
        weights[row, :length] = 1
    order = sputnik.row_order(from_dense(weights))
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert [lengths[row] for row in order] == sorted(lengths, reverse=True)
