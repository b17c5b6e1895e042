"""cuBLAS as a choice: who is chosen, what the artifact says of it, and that a kernel of ours stands in for it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lospmm.artifact import artifact
from lospmm.artifact.artifact import Artifact
from lospmm.artifact.describe import facts_of
from lospmm.cli.show import show_manifest, show_replay
from lospmm.errors import BadRequest
from lospmm.gpu.compare import Comparison, bound
from lospmm.gpu.libraries import DENSE_OF, BaselineTime, VariantTime, cublas
from lospmm.gpu.libraries.dense import CublasKernel
from lospmm.gpu.libraries.library import Library, load
from lospmm.gpu.timing import Timing
from lospmm.kernel import Kernel
from lospmm.matrix.csr import from_dense
from lospmm.problem.accuracy import ACCURACY
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import Epilogue
from lospmm.problem.problem import Problem
from lospmm.store import Store
from lospmm.tuning import jobs, tuner
from lospmm.tuning.dense import accuracy_of_dense, dense_choice, left_to_cublas
from lospmm.tuning.job import Job
from lospmm.tuning.options import Options
from lospmm.tuning.replay import replay
from lospmm.tuning.request import Request
from lospmm_rank.predict import corrections as learned
from tests.gpu.test_baselines import HostDriver, fake  # noqa: F401 (a fixture)

M, K, N = 256, 192, 512
RNG = np.random.default_rng(8)
WEIGHTS = np.where(RNG.random((M, K)) < 0.8, RNG.normal(size=(M, K)), 0).astype(np.float32)


def request(dtype: str = "float16", families: str = "csr,dense", **options: str) -> Request:
    problem = Problem(from_dense(WEIGHTS), N, DEVICES["h200"])
    return Request(problem, Options(dtype=dtype, families=families, verify="none", **options))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return Kernel(jobs.tune(request(), store=Store(tmp_path_factory.mktemp("store"))))


def time_of(dtype: str, micros: float | None, failure: str | None = None) -> BaselineTime:
    name = DENSE_OF[dtype]
    timing = None if micros is None else Timing(micros, 0.01, 15)
    return BaselineTime(name, "cuBLAS 13.1", (VariantTime("way", timing, 2e-4, failure),), failure)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("forecast", "timed", "kernel", "chosen"),
    [(9.0, None, 10.0, True), (11.0, None, 10.0, False), (99.0, 9.9, 10.0, True), (1.0, 10.0, 10.0, False)],
)
def test_the_faster_one_is_chosen(
    dtype: str, forecast: float, timed: float | None, kernel: float, chosen: bool
) -> None:
    """By the time of the same type alone, where there is one."""
    problem = replace(request().problem, dtype=DTYPES[dtype])
    times = {name: time_of(other, 1e-3) for other, name in DENSE_OF.items() if other != dtype}
    times |= {} if timed is None else {DENSE_OF[dtype]: time_of(dtype, timed)}
    found = dense_choice(problem, forecast, times, kernel_micros=kernel)
    assert found.is_chosen == chosen and found.micros == timed
    assert (found.in_manifest() is not None) == chosen


def test_what_it_cannot_compute_it_is_not_chosen_for() -> None:
    problem = request().problem
    with_relu = replace(problem, epilogue=Epilogue(relu=True))
    refused = dense_choice(with_relu, 1.0, {}, kernel_micros=10.0)
    assert not refused.is_chosen and refused.why_not == "an epilogue"
    failed = dense_choice(
        problem, 1.0, {"cublas_fp16": time_of("float16", None, "is not installed")}, kernel_micros=10.0
    )
    assert not failed.is_chosen and failed.why_not == "is not installed"


def test_a_kernel_stands_in_for_it(made: Kernel, tmp_path: Path) -> None:
    manifest = made.manifest
    assert (manifest["family"], manifest["cubin_family"], manifest["emitter"]) == ("dense", "csr", "template")
    assert manifest["dense"]["micros"] is None and manifest["plan"]["axes"]["warps"] > 0
    csr, dense = manifest["search"]["families"]
    assert (dense["name"], dense["plans"], dense["timed"], dense["micros"]) == ("dense", 1, 0, None)
    assert dense["forecast_micros"] == manifest["dense"]["forecast_micros"] < csr["forecast_micros"]
    assert manifest["accuracy"]["sum_rounding"] == 4 * ACCURACY["float16"].unit_roundoff
    made.save(tmp_path / "kernel")
    kept = artifact.read(tmp_path / "kernel")
    assert kept.manifest == made.artifact.manifest
    b = RNG.normal(size=(K, N)).astype(np.float16).astype(np.float32)
    expected = WEIGHTS.astype(np.float16).astype(float) @ b
    assert np.max(abs(Kernel(kept).run_on_cpu(b) - expected)) < 0.05
    assert "us by cuBLAS; in the cubin csr," in facts_of(manifest)["family"]


def test_its_choice_is_made_again(made: Kernel, capsys: pytest.CaptureFixture[str]) -> None:
    found = replay(made.artifact, DEVICES["h200"])
    assert found.agrees and found.winner["family"] == "csr" and found.winner["dense"] == "chosen"
    show_replay(found)
    show_manifest(made.manifest, Path("kernel"), as_json=False)
    assert "by cuBLAS; in the cubin csr" in capsys.readouterr().out


@pytest.mark.parametrize("dense_micros", [1.0, 1e6])
def test_a_choice_by_time_is_made_again(dense_micros: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The GPU of this tuning is made up from the comparison on."""

    def compared(job: Job, _built: object, _bench: object, before: None) -> Comparison:
        assert before is None
        times = {DENSE_OF["float16"]: time_of("float16", dense_micros)}
        limit = bound(job.problem)
        return Comparison("a GPU", "cold", 2, Timing(20.0, 0.01, 15), 1e-4, 0.0, limit, times, None)

    monkeypatch.setattr(tuner, "compare_winner", compared)
    done = jobs.tune(request(), store=Store(tmp_path))
    manifest, chosen = done.manifest, dense_micros < 20.0
    assert manifest["family"] == ("dense" if chosen else "csr") and manifest["measured"]["micros"] == 20.0
    lines = [json.loads(line) for line in done.files[artifact.TUNING_FILE].splitlines()]
    dense = next(line for line in lines if line["family"] == "dense")
    assert (dense["measured_micros"], dense["kernel_micros"]) == (dense_micros, 20.0)
    assert manifest["search"]["families"][-1]["micros"] == dense_micros
    if chosen:
        assert manifest["dense"]["micros"] == 1.0 and manifest["dense"]["max_relative_error"] == 2e-4
        assert facts_of(manifest)["family"].startswith("dense, 1.00 us")

    # The times of the log decide, as if the plans had been timed too.
    csr = {**lines[0], "measured_micros": 20.0, "spread": 0.0, "max_relative_error": 0.0, "failure": None}
    log = "".join(f"{json.dumps(line)}\n" for line in ({**csr, "final_micros": []}, dense)).encode()
    timed = {**manifest, "search": {**manifest["search"], "measured": 1, "trials": "full"}}
    found = replay(Artifact(timed, {**done.files, artifact.TUNING_FILE: log}), DEVICES["h200"])
    assert found.agrees and found.timed == 1 and ("dense" in found.winner) == chosen


def test_it_is_left_out_where_it_was_not_asked_for(tmp_path: Path) -> None:
    done = jobs.tune(request(families="csr"), store=Store(tmp_path))
    assert (done.manifest["family"], done.manifest["dense"]) == ("csr", None)
    with pytest.raises(BadRequest, match="families: dense alone has no kernel"):
        Options(families="dense")
    assert Options(families="all").family_names[-1] == "dense"
    assert "dense" not in Options(families="all").kernel_names


def test_float32_is_not_left_to_it(tmp_path: Path) -> None:
    """By forecast: cuBLAS in full float32 takes longer than kernels of a matrix with so many zeros."""
    weights = np.where(RNG.random((M, K)) < 0.05, 1.0, 0).astype(np.float32)
    few = replace(request("float32").problem, matrix=from_dense(weights), n=4096)
    done = jobs.tune(replace(request("float32", "unrolled,dense"), problem=few), store=Store(tmp_path))
    assert (done.manifest["family"], done.manifest["cubin_family"]) == ("unrolled", "unrolled")
    assert replay(done, DEVICES["h200"]).agrees


def test_a_manifest_says_both_or_neither(made: Kernel) -> None:
    damaged = json.dumps({**made.manifest, "dense": None}).encode()
    with pytest.raises(BadRequest, match="dense: only the family dense has it"):
        artifact.from_files({**made.artifact.files, artifact.MANIFEST_FILE: damaged}, "here")
    earlier = {name: value for name, value in made.manifest.items() if name not in ("dense", "cubin_family")}
    read = artifact.from_files(
        {**made.artifact.files, artifact.MANIFEST_FILE: json.dumps({**earlier, "family": "csr"}).encode()}, "here"
    )
    assert (read.manifest["cubin_family"], read.manifest["dense"]) == ("csr", None)


def test_it_is_launched_through_cublas(made: Kernel, fake: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def opened() -> Library:
        return load(fake, cublas.TYPES, "cublasGetStatusName")

    monkeypatch.setattr("lospmm.gpu.libraries.dense.open_library", opened)
    driver = HostDriver()
    launch = made.launcher(driver)
    assert isinstance(launch, CublasKernel)
    b, c = RNG.uniform(-1, 1, size=(K, N)).astype(np.float16), np.zeros((M, N), dtype=np.float16)
    assert launch(driver.stream, b.ctypes.data, c.ctypes.data)
    exact = WEIGHTS.astype(np.float16).astype(float) @ b.astype(float)
    assert np.max(abs(c - exact)) < 0.1
    launch.unload()
    assert not driver.blocks


@pytest.mark.parametrize("dtype", DTYPES)
def test_its_accuracy_is_what_the_library_is_held_to(dtype: str) -> None:
    own, dense = ACCURACY[dtype], accuracy_of_dense(DTYPES[dtype])
    assert dense.sum_rounding >= own.sum_rounding and replace(dense, sum_rounding=own.sum_rounding) == own
    assert (dense == own) == (dtype == "float32")


def test_a_layer_is_left_to_pytorch(made: Kernel) -> None:
    assert left_to_cublas(made.manifest) is None  # a forecast is no reason
    timed = {**made.manifest, "dense": {**made.manifest["dense"], "micros": 9.0}, "measured": {"micros": 12.0}}
    assert left_to_cublas(timed) == "cuBLAS is faster than its kernel: 9.0 of 12.0 us"


def test_other_corrections_are_another_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = request().digest
    learned.corrections_digest.cache_clear()  # as in a process of another version
    monkeypatch.setattr(learned, "WEIGHTS", tmp_path)
    assert request().digest != before
    learned.corrections_digest.cache_clear()
    (tmp_path / "h200.json").write_text("{}")
    assert len({before, request().digest}) == 2
    learned.corrections_digest.cache_clear()


def test_a_guess_has_to_be_clearly_lower(tmp_path: Path) -> None:
    """Of a GPU of which nothing was learned cuBLAS's forecast is too low, most of all for small products."""
    random = np.random.default_rng(3)
    small = from_dense(np.where(random.random((64, 64)) < 0.2, random.normal(size=(64, 64)), 0).astype(np.float32))
    assert not learned.is_learned(DEVICES["a100"]) and learned.is_learned(DEVICES["h200"])
    for device in ("h200", "a100"):
        asked = Request(Problem(small, 256, DEVICES[device]), Options(verify="none", measure="none"))
        assert Kernel(jobs.tune(asked, store=Store(tmp_path))).manifest["family"] == "unrolled"
    assert learned.dense_share(DEVICES["h200"]) == 1.0 and learned.dense_share(DEVICES["a100"]) == learned.GUESSED < 1.0
