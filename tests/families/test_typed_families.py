"""Types of B and C from request to artifact: the manifest, the CPU, what a wrong weight does."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lospmm.artifact import artifact
from lospmm.cli.main import run
from lospmm.cpu.verify import verify_packed_on_cpu
from lospmm.errors import BadRequest, NothingFits, Unsupported, VerificationFailed
from lospmm.families import FAMILIES
from lospmm.kernel import Kernel
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.accuracy import ACCURACY
from lospmm.problem.convolution import Convolution
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES, Dtype
from lospmm.problem.epilogue import epilogue_of
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.template import emission_of
from lospmm.tuning import jobs
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request
from lospmm_server.queued_request import from_json, keep_matrix, to_json

M, K, N = 37, 60, 150
RNG = np.random.default_rng(6)
WEIGHTS = np.where(RNG.random((M, K)) < 0.3, RNG.normal(size=(M, K)), 0).astype(np.float32)
WEIGHTS[11] = 0
MATRIX = from_dense(WEIGHTS)

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def request(dtype: Dtype, matrix: SparseMatrix = MATRIX, **options: str) -> Request:
    """By the options alone: the problem follows them."""
    return Request(Problem(matrix, N, DEVICES["h200"]), Options(dtype=dtype.name, **{"families": "csr", **options}))


@dtypes
def test_a_kernel_of_a_type(dtype: Dtype, tmp_path: Path) -> None:
    kernel = Kernel(jobs.tune(request(dtype), store=Store(tmp_path)))
    manifest = kernel.manifest
    accuracy = ACCURACY[dtype.name]
    assert manifest["dtype"] == dtype.name
    assert [one["type"] for one in manifest["arguments"]] == [f"const {dtype.c_type} *", f"{dtype.c_type} *"]
    assert manifest["accuracy"]["a_rounding"] == accuracy.a_rounding
    b = RNG.normal(size=(K, N)).astype(np.float32)
    stored = dtype.from_storage(dtype.to_storage(b)).astype(np.float64)
    c, exact = kernel.run_on_cpu(b), WEIGHTS.astype(np.float64) @ stored
    of_product = accuracy.a_rounding + accuracy.b_rounding + accuracy.sum_rounding
    limit = of_product * (abs(WEIGHTS) @ abs(stored)) + accuracy.c_rounding * abs(c) + 1e-6
    assert (abs(c - exact) <= limit).all()
    if dtype.is_16_bit:
        assert not np.allclose(c, exact, rtol=1e-6, atol=0)
        assert np.array_equal(c, dtype.from_storage(dtype.to_storage(c)))


def test_every_type_is_another_request() -> None:
    assert len({request(dtype).digest for dtype in DTYPES.values()}) == len(DTYPES)


@dtypes
def test_a_request_is_sent_with_its_type(dtype: Dtype, tmp_path: Path) -> None:
    store, sent = Store(tmp_path), request(dtype).settled()
    keep_matrix(MATRIX, store)
    read = from_json(to_json(sent), store)
    assert (read.problem.dtype, read.digest) == (dtype, sent.digest)


@pytest.mark.parametrize(("dtype", "seed"), [(DTYPES["float32"], 0), (DTYPES["tf32"], 1), (DTYPES["float16"], 1)])
def test_a_wrong_weight_in_the_data_is_refused(dtype: Dtype, seed: int) -> None:
    epilogue = epilogue_of(np.arange(M, dtype=np.float32) / 16, relu=seed == 1, residual=True)
    problem = Problem(MATRIX, N, DEVICES["h200"], epilogue=epilogue, dtype=dtype)
    family = FAMILIES["csr"]
    kernel = family.pack(problem, family.plans(problem)[0])
    told: list[tuple[int, int]] = []
    assert verify_packed_on_cpu(problem, kernel, seed=seed, progress=lambda *parts: told.append(parts)).columns > 64
    assert told[-1] == (100, 100) and told == sorted(told), "hundredths"
    weights = MATRIX.data.copy()
    place = int(np.argsort(abs(weights))[len(weights) // 2])
    weights[place] *= -1
    wrong = family.pack(replace(problem, matrix=replace(MATRIX, data=weights)), family.plans(problem)[0])
    row = int(MATRIX.rows_of_nonzeros()[place])
    with pytest.raises(VerificationFailed, match=rf"row {row}, column \d+: got"):
        verify_packed_on_cpu(problem, wrong, seed=seed)


def test_what_is_too_large_for_the_cpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lospmm.cpu.verify.MAX_PACKED_ELEMENTS", 1000)
    problem = Problem(MATRIX, N, DEVICES["h200"])
    family = FAMILIES["csr"]
    words = rf"verify cpu: B and C have {(M + K) * N} elements, over the 1000 .* --verify none"
    with pytest.raises(Unsupported, match=words):
        verify_packed_on_cpu(problem, family.pack(problem, family.plans(problem)[0]))


def test_unrolled_kernels_have_16_bits_as_machine_code_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(BadRequest, match="dtype float16, sums float32: ptx has no unrolled kernels of them"):
        jobs.tune(request(DTYPES["float16"], families="unrolled", emitter="ptx"), store=store)
    exact = jobs.tune(request(DTYPES["tf32"], families="unrolled", emitter="ptx"), store=store).manifest
    assert exact["dtype"] == "tf32" and exact["accuracy"]["a_rounding"] == 0


def test_a_convolution_of_16_bits_is_for_machine_code(tmp_path: Path) -> None:
    window = Convolution(1, 15, 4, 4, 2, 2)
    problem = Problem(MATRIX, window.n, DEVICES["h200"], window)
    found = jobs.tune(Request(problem, Options(dtype="float16")), store=Store(tmp_path)).manifest
    assert (found["family"], found["dtype"], found["tile"]["thread_columns"]) == ("unrolled", "float16", 1)
    wanted = Request(problem, Options(dtype="float16", emitter="ptx"))
    with pytest.raises(NothingFits, match=r"unrolled: dtype float16, sums float32: ptx has .*; csr: no convolutions"):
        jobs.tune(wanted, store=Store(tmp_path))


def test_a_weight_beyond_float16_is_refused_with_the_request() -> None:
    matrix = from_dense(np.array([[1.0, 1e5]]))
    with pytest.raises(BadRequest, match="dtype float16: A holds 100000, out of its range"):
        request(DTYPES["float16"], matrix)


def test_the_layers_of_a_model_are_of_a_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    np.save(tmp_path / "model" / "first.npy", WEIGHTS)
    np.save(tmp_path / "model" / "second.npy", 1e5 * WEIGHTS)
    asked = ["tune-model", str(tmp_path / "model"), "--n", "64", "--device", "h200", "--dtype", "float16", "--quiet"]
    assert run([*asked, "--out", str(tmp_path / "out")]) == 6
    answer = capsys.readouterr()
    assert "layer second: dtype float16: A holds" in answer.err
    assert artifact.read(tmp_path / "out" / "first").manifest["dtype"] == "float16"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, DTYPES[one]) for name in FAMILIES for one in ("float32", "bfloat16")] + [("tensor_core", DTYPES["tf32"])],
)
def test_every_family_is_as_exact_as_its_type(name: str, dtype: Dtype) -> None:
    """Its plan of the best forecast, on long rows."""
    rng = np.random.default_rng(1)
    weights = np.where(rng.random((40, 700)) < 0.5, rng.normal(size=(40, 700)), 0)
    n = {"bitmap": 40, "spmv": 1}.get(name, 136)
    problem = Problem(from_dense(weights), n, DEVICES["h200"], dtype=dtype)
    family = FAMILIES[name]
    if (why := family.refusal(problem)) is not None:
        assert name in ("bitmap", "spmv") and not dtype.is_16_bit and "16-bit" in why
        return
    plans = family.plans(problem)
    plan = plans[int(np.argmin(family.forecast(problem, plans)))]
    error = verify_packed_on_cpu(problem, family.pack(problem, plan)).max_relative_error
    accuracy = ACCURACY[dtype.name]
    assert error < accuracy.sum_rounding + accuracy.c_rounding + (3 * 2.0**-11 if dtype.name == "tf32" else 0)


@pytest.mark.parametrize("name", ["csr", "group_coo"])
def test_bfloat16_compiles_where_no_instruction_rounds_to_it(name: str) -> None:
    problem = Problem(from_dense(WEIGHTS), 72, DEVICES["rtx2080ti"], dtype=DTYPES["bfloat16"])
    family = FAMILIES[name]
    kernel = family.pack(problem, family.plans(problem)[0])
    store = Store(settings().cache_dir)
    assert compile_kernel(emission_of(kernel), arch="sm_75", registers=kernel.registers, store=store, workers=1).cubin
