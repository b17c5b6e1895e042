"""NVIDIA's libraries on a real GPU: every element of their C, their times, and `lospmm bench` as a whole."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lospmm.artifact import artifact, kept
from lospmm.cli.main import run
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device
from lospmm.gpu.libraries import BASELINES, DENSE_OF, MAX_TF32_ERROR, BaselineTime, baselines_of, cusparselt
from lospmm.gpu.libraries.work import COMMAND, BaselineTask
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.dtype import DTYPES, FLOAT32
from lospmm.problem.problem import Problem
from lospmm.problem.values import VALUE_TYPES
from lospmm.tuning import jobs
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request

pytestmark = pytest.mark.gpu


def drawn(m: int, k: int, density: float, every: int = 1) -> SparseMatrix:
    """Rows that are no multiple of ``every`` are empty."""
    rng = np.random.default_rng(m * k)
    weights = np.where(rng.random((m, k)) < density, rng.normal(size=(m, k)), 0)
    weights[np.arange(m) % every != 0] = 0
    return from_dense(weights)


CASES = {
    "a layer": (drawn(256, 576, 0.1), 4096),
    "ragged": (drawn(100, 147, 0.1), 1003),
    "one column": (drawn(64, 64, 0.2), 1),
    "mostly empty rows": (drawn(512, 128, 0.3, every=11), 500),
    "strides beyond 16 MiB": (drawn(6, 40, 0.5), 5_000_000),
}


@pytest.fixture(scope="module", params=CASES)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    matrix, n = CASES[request.param]
    with Bench(Problem(matrix, n, detect_device())) as opened:
        yield opened


def timed(bench: Bench, name: str) -> BaselineTime:
    found = bench.request(COMMAND, BaselineTask(name, "cold"))
    assert isinstance(found, BaselineTime)
    if found.failure is not None and "is not installed" in found.failure:
        pytest.skip(found.failure)
    return found


@pytest.mark.parametrize("name", ["cusparse", "cublas_fp32", "cublas_tf32"])
def test_a_library_computes_all_of_c_and_is_timed(bench: Bench, name: str) -> None:
    found = timed(bench, name)
    assert found.failure is None
    print(found)
    for way in found.variants:
        assert way.failure is None, way
        assert way.timing is not None and way.timing.micros > 0
        assert way.max_relative_error is not None
    assert found.micros == min(way.micros for way in found.variants)


def test_algorithms_of_cusparse(bench: Bench) -> None:
    assert [way.name for way in timed(bench, "cusparse").variants] == ["CSR_ALG2", "CSR_ALG3"]


def test_tf32_is_tf32_and_fp32_is_not() -> None:
    """Seen by their errors: at 4,096 columns some element shows what 10 bits do."""
    matrix, n = CASES["a layer"]
    with Bench(Problem(matrix, n, detect_device())) as bench:
        fp32, tf32 = (timed(bench, name).best for name in ("cublas_fp32", "cublas_tf32"))
    assert fp32 is not None and tf32 is not None
    assert fp32.max_relative_error is not None and fp32.max_relative_error < 1e-6
    assert tf32.max_relative_error is not None and 1e-5 < tf32.max_relative_error < MAX_TF32_ERROR


@pytest.mark.parametrize("name", ["tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", ["a layer", "ragged", "one column"])
def test_libraries_of_a_type(name: str, case: str) -> None:
    """All of them are right and timed where their requirements are met: vectors of 16 bytes need an even N."""
    dtype = DTYPES[name]
    matrix, n = CASES[case]
    with Bench(Problem(matrix, n, detect_device(), dtype=dtype)) as bench:
        for baseline in baselines_of(dtype):
            if baseline != "sputnik":
                found = timed(bench, baseline)
                print(name, found)
                assert found.failure is None or case != "a layer"


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("n", [8, 64, 4096])
@pytest.mark.parametrize("is_exact", [True, False])
def test_cusparselt_multiplies_the_pruned_matrix(name: str, n: int, is_exact: bool) -> None:
    """The gate holds all of its C to the product of the pruned A, and cuBLAS's after it to that of A."""
    dtype, matrix = DTYPES[name], drawn(1024, 2048, 0.5)
    matrix = cusparselt.prune(matrix) if is_exact else matrix
    own, dense = next(one for one in baselines_of(dtype) if one.startswith("cusparselt")), DENSE_OF[name]
    with Bench(Problem(matrix, n, detect_device(), dtype=dtype), cache="streamed") as bench:
        for baseline in (own, dense, own):
            found = bench.request(COMMAND, BaselineTask(baseline, "streamed"))
            assert isinstance(found, BaselineTime)
            print(name, n, found)
            assert found.failure is None and found.best is not None
            if baseline == own:
                assert found.best.name == (cusparselt.EXACT if is_exact else cusparselt.PRUNED)
                assert found.library is not None and found.library.startswith("cuSPARSELt 0.")


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize(("values", "library"), [("int8", "cublas_int8"), ("fp8_e4m3", "cublas_fp8")])
@pytest.mark.parametrize("n", [1, 8, 24, 1000])
def test_cublaslt_multiplies_8_bits(name: str, values: str, library: str, n: int) -> None:
    """What the library proposes is right; sums of int8 are exact."""
    if detect_device().arch_number < VALUE_TYPES[values].least_arch:
        pytest.skip("no such numbers")
    problem = Problem(drawn(1024, 2048, 0.5), n, detect_device(), dtype=DTYPES[name], values=VALUE_TYPES[values])
    with Bench(problem, cache="streamed") as bench:
        found = bench.request(COMMAND, BaselineTask(library, "streamed", is_searched=True))
    assert isinstance(found, BaselineTime)
    print(name, n, found)
    assert found.failure is None
    assert all(way.failure is None for way in found.variants)
    assert all((way.max_relative_error == 0) == (values == "int8") for way in found.variants)


def test_a_matrix_without_a_nonzero() -> None:
    """No library has to take it; whatever it does is a time or a reason, and the worker lives on."""
    with Bench(Problem(from_dense(np.zeros((130, 20))), 77, detect_device())) as bench:
        for name in ("cusparse", "cublas_fp32", "cusparse"):
            found = timed(bench, name)
            print(found)
            assert (found.best is None) == (found.failure is not None)


@pytest.mark.parametrize("flags", [[], ["--cache", "warm"], ["--cache", "network"]], ids=["cold", "warm", "network"])
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    matrix, n = drawn(768, 768, 0.1), 4096
    kernel = jobs.tune(Request(Problem(matrix, n, detect_device()), Options()), store=kept.open_store())
    artifact.write(kernel, tmp_path / "kernel")
    assert run(["bench", str(tmp_path / "kernel"), "--quiet", *flags]) == 0
    text = capsys.readouterr().out
    assert all(BASELINES[name].title in text for name in baselines_of(FLOAT32))
    assert run(["bench", str(tmp_path / "kernel"), "--json", "--quiet", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["baselines"]) == set(baselines_of(FLOAT32))
    assert found["cold"] == (not flags)
    assert 0 < found["bound_micros"] < found["micros"] < found["cusparse_micros"]
    assert 0 <= found["noise"] < 1  # another load of the module may lie elsewhere; how much that costs is no test
    assert found["cublas_tf32_micros"] < found["cublas_fp32_micros"]
    assert found["clocks"] is None or found["clocks"]["sm_mhz"] > 0
    if found["baselines"]["sputnik"]["library"] is None:
        assert "no library is named" in found["baselines"]["sputnik"]["failure"]
