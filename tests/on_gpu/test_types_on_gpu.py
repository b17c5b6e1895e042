"""Types of B and C on a real GPU: the gate against verify.py, a wrong weight, libraries, and a tuning as a whole."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lospmm.artifact import artifact
from lospmm.cli.main import run
from lospmm.codegen.sass.generations import GENERATIONS
from lospmm.cpu.reference import compare
from lospmm.families import FAMILIES
from lospmm.families.candidate import Candidate
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device
from lospmm.gpu.libraries import baselines_of
from lospmm.gpu.protocol import Driver
from lospmm.gpu.timing import BRIEF
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES, Dtype
from lospmm.problem.epilogue import epilogue_of
from lospmm.problem.lanes import in_lanes
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.estimate import estimate_micros
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.toolchain.compile import Compiled
from lospmm.tuning.build import build, for_emitter
from lospmm.tuning.replay import replay
from lospmm.tuning.unrolled import search
from tests.on_gpu.checked_run import run_cubin
from tests.on_gpu.problems import matrix

pytestmark = pytest.mark.gpu

SMALL = Problem(matrix(1, 1, 1.0), 2, DEVICES["h200"])

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)

#: The types that unrolled kernels have on this GPU, with what their sums are rounded to.
unrolled_types = pytest.mark.parametrize(
    ("dtype", "sums"),
    [
        (dtype.name, sums)
        for dtype in DTYPES.values()
        for sums in dict.fromkeys(("float32", dtype.name if dtype.is_16_bit else "float32"))
        if SMALL.device.arch in GENERATIONS
    ],
)


def packed(problem: Problem) -> Compiled:
    """The first plan of the csr family."""
    plan = FAMILIES["csr"].plans(problem)[0]
    store = Store(settings().cache_dir)
    return build(problem, Candidate("csr", plan, 1.0), "", store=store, workers=1).compiled


def unrolled(problem: Problem) -> Compiled:
    """What the search puts first."""
    asked = for_emitter(problem, "sass")
    chosen = search(in_lanes(asked), estimate_micros, 1, Stages()).winner
    return build(asked, chosen, "sass", store=Store(settings().cache_dir), workers=1).compiled


@dtypes
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (65, 900, 333), (256, 576, 4096)])
def test_the_gate_agrees_with_verify(driver: Driver, dtype: Dtype, m: int, k: int, n: int) -> None:
    epilogue = epilogue_of(np.linspace(-1, 1, m, dtype=np.float32), relu=n == 333, residual=n != 4096)
    problem = Problem(matrix(m, k, 0.3), n, detect_device(), epilogue=epilogue, dtype=dtype)
    check_gate(driver, problem, packed(problem))


@unrolled_types
@pytest.mark.parametrize(("m", "k", "n"), [(7, 30, 2), (65, 900, 334), (300, 64, 4096), (1030, 2100, 4098)])
def test_the_gate_agrees_with_verify_of_unrolled_kernels(
    driver: Driver, dtype: str, sums: str, m: int, k: int, n: int
) -> None:
    """The last one reaches beyond a window of addresses."""
    density = 0.3 if m < 1000 else 0.01
    problem = Problem(matrix(m, k, density), n, detect_device(), dtype=DTYPES[dtype], sums=DTYPES[sums])
    check_gate(driver, problem, unrolled(problem))


def check_gate(driver: Driver, problem: Problem, kernel: Compiled) -> None:
    """That it lets ``kernel`` pass, and that its errors are those of ``reference.compare``."""
    n = problem.n
    found, verdict = run_cubin(driver, problem, kernel.cubin, kernel.entry, kernel.launch)
    b, c, *residual = (one.reshape(-1, n) for one in found)
    columns = np.unique(np.linspace(0, n - 1, 400).astype(np.int64))
    third = residual[0][:, columns] if residual else None
    error = compare(problem, columns, b[:, columns], c[:, columns], third)
    assert error <= verdict.max_relative_error * (1 + 1e-6)
    if n <= 400:
        assert verdict.max_relative_error == pytest.approx(error, rel=1e-6)


@unrolled_types
def test_a_wrong_weight_in_the_code_is_refused(dtype: str, sums: str) -> None:
    """Of some 25 in its row: sums of bfloat16 hide one in rows of hundreds (docs/accuracy.md)."""
    problem = Problem(matrix(64, 250, 0.1), 1000, detect_device(), dtype=DTYPES[dtype], sums=DTYPES[sums])
    right, wrong = unrolled(problem), unrolled(replace(problem, matrix=one_negated(problem)))
    with Bench(problem) as bench:
        refused = bench.measure(wrong.cubin, wrong.entry, wrong.launch, effort=BRIEF)
        assert refused.failure is not None and refused.failure.startswith("row ")
        assert bench.measure(right.cubin, right.entry, right.launch, effort=BRIEF).failure is None


def one_negated(problem: Problem) -> SparseMatrix:
    """The weight in the middle of all by their size."""
    weights = problem.matrix.data.copy()
    weights[int(np.argsort(abs(weights))[len(weights) // 2])] *= -1
    return replace(problem.matrix, data=weights)


@unrolled_types
def test_an_unrolled_kernel_is_tuned_and_compared(
    tmp_path: Path, dtype: str, sums: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "w.npy", np.where(rng.random((256, 576)) < 0.1, rng.normal(size=(256, 576)), 0))
    asked = ["tune", str(tmp_path / "w.npy"), "--n", "4096", "--dtype", dtype, "--sums", sums, "--budget", "12"]
    out = tmp_path / "kernel"
    assert run([*asked, "--families", "unrolled", "--out", str(out), "--measure", "gpu", "--json", "--quiet"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert (manifest["family"], manifest["sums"]) == ("unrolled", sums)
    tile = manifest["tile"]
    assert tile["thread_columns"] == (tile["thread_words"] if sums == "float32" else 2)
    assert 0 < manifest["verified"]["max_relative_error"] < manifest["accuracy"]["sum_rounding"] + 0.01
    print(dtype, sums, manifest["tile"], manifest["measured"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_two_columns_to_a_thread_are_chosen_where_most_of_a_tile_is_loads(
    tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the log replays to the same choice."""
    if detect_device().arch not in GENERATIONS:
        pytest.skip(f"no machine code of 16 bits for {detect_device().arch}")
    rng = np.random.default_rng(0)
    np.save(tmp_path / "w.npy", np.where(rng.random((768, 768)) < 0.02, rng.normal(size=(768, 768)), 0))
    asked = ["tune", str(tmp_path / "w.npy"), "--n", "4096", "--dtype", dtype, "--families", "unrolled"]
    out = tmp_path / "kernel"
    assert run([*asked, "--out", str(out), "--measure", "gpu", "--json", "--quiet"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert (manifest["tile"]["thread_words"], manifest["tile"]["thread_columns"]) == (2, 2)
    lines = [json.loads(line) for line in (out / "tuning.jsonl").read_text().splitlines()]
    assert {line["thread_words"] for line in lines} == {1, 2}
    assert {line["failure"] for line in lines} == {None}
    assert replay(artifact.read(out), detect_device()).agrees
    print(dtype, manifest["tile"], manifest["measured"])


@dtypes
def test_a_wrong_weight_is_refused(dtype: Dtype) -> None:
    """Not the smallest, of some 580 in its row: it is negated."""
    problem = Problem(matrix(64, 2900, 0.2), 1000, detect_device(), dtype=dtype)
    weights = problem.matrix.data.copy()
    place = int(np.argsort(abs(weights))[len(weights) // 2])
    weights[place] *= -1
    wrong = packed(replace(problem, matrix=replace(problem.matrix, data=weights)))
    right = packed(problem)
    with Bench(problem) as bench:
        refused = bench.measure(wrong.cubin, wrong.entry, wrong.launch, effort=BRIEF)
        row = int(problem.matrix.rows_of_nonzeros()[place])
        assert refused.failure is not None and refused.failure.startswith(f"row {row}, column ")
        measured = bench.measure(right.cubin, right.entry, right.launch, effort=BRIEF)
        assert measured.failure is None
        print(dtype.name, refused.failure, measured)


@dtypes
def test_a_layer_is_tuned_and_compared(tmp_path: Path, dtype: Dtype, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "w.npy", np.where(rng.random((256, 576)) < 0.1, rng.normal(size=(256, 576)), 0))
    asked = ["tune", str(tmp_path / "w.npy"), "--n", "4096", "--dtype", dtype.name, "--families", "csr"]
    out = tmp_path / "kernel"
    assert run([*asked, "--out", str(out), "--measure", "gpu", "--json", "--quiet"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["verified"] == {
        "on": "gpu",
        "max_relative_error": manifest["verified"]["max_relative_error"],
        "columns": 4096,
    }
    measured = manifest["measured"]
    dense = {name for name in baselines_of(dtype) if name.startswith("cublas")}
    assert dense and all(measured[f"{name}_micros"] > 0 for name in dense)
    assert 0 < measured["bound_micros"] < measured["micros"]
    assert run(["bench", str(out), "--json", "--quiet"]) == 0
    benched = json.loads(capsys.readouterr().out)
    assert set(benched["baselines"]) == set(baselines_of(dtype))
    print(dtype.name, measured)
