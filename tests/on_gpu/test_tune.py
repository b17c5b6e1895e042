"""`lospmm tune --measure gpu` and `lospmm bench` on a real GPU, by the command line."""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lospmm
from lospmm.cli.main import run
from lospmm.gpu.detect import detect_device
from lospmm.gpu.libraries import baselines_of
from lospmm.problem.dtype import FLOAT32
from lospmm.tuning.options import DENSE

pytestmark = pytest.mark.gpu

M, K, N = 256, 576, 4096


@pytest.fixture(scope="module")
def weights() -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.where(rng.random((M, K)) < 0.1, rng.normal(size=(M, K)), 0).astype(np.float32)


def tune(tmp_path: Path, weights: np.ndarray, *options: str) -> int:
    np.save(tmp_path / "w.npy", weights)
    return run(["tune", str(tmp_path / "w.npy"), "--n", str(N), "--out", str(tmp_path / "kernel"), *options])


def test_a_layer_is_measured_verified_and_compared(
    tmp_path: Path, weights: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(tmp_path, weights, "--measure", "gpu", "--shortlist", "6", "--json", "--quiet") == 0
    manifest: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert manifest["device"] == detect_device().name
    assert manifest["verified"]["on"] == "gpu" and manifest["verified"]["columns"] == N
    assert 0 < manifest["verified"]["max_relative_error"] < 1e-6
    measured, search = manifest["measured"], manifest["search"]
    assert 0 < measured["bound_micros"] < measured["micros"] < measured["cusparse_micros"]
    assert 0 < measured["cublas_tf32_micros"] < measured["cublas_fp32_micros"]
    assert measured["advice"] in ("sparse", "dense")
    assert search["chosen_by"] == "measurement" and search["measured"] >= 6

    log = [json.loads(line) for line in (tmp_path / "kernel" / "tuning.jsonl").read_text().splitlines()]
    trials = [line for line in log if line["family"] != DENSE]
    assert len(trials) == search["measured"]
    timed = [line for line in trials if line["failure"] is None]
    assert timed and all(line["measured_micros"] > 0 and line["max_relative_error"] < 1e-6 for line in timed)
    last = max(len(line["final_micros"]) for line in timed)
    finalists = [line for line in timed if len(line["final_micros"]) == last]
    best = min(finalists, key=lambda line: statistics.median(line["final_micros"]))
    assert {axis: best[axis] for axis in ("rows", "cols", "prefetch", "column_group")} == {
        axis: manifest["tile"][axis] for axis in ("rows", "cols", "prefetch", "column_group")
    }
    assert measured["micros"] == pytest.approx(statistics.median(best["final_micros"]), rel=0.2)

    b = np.random.default_rng(1).normal(size=(K, N)).astype(np.float32)
    c = lospmm.load(tmp_path / "kernel").run_on_cpu(b)
    np.testing.assert_allclose(c, weights @ b, rtol=1e-3, atol=1e-4)

    assert run(["bench", str(tmp_path / "kernel"), "--json", "--quiet"]) == 0
    benched = json.loads(capsys.readouterr().out)
    assert set(benched["baselines"]) == set(baselines_of(FLOAT32))
    assert benched["micros"] == pytest.approx(measured["micros"], rel=0.2)
    assert benched["max_relative_error"] < 1e-6


@pytest.mark.parametrize("emitter", ["ptx", "cuda"])
def test_a_search_by_proxies(
    tmp_path: Path, weights: np.ndarray, capsys: pytest.CaptureFixture[str], emitter: str
) -> None:
    few = ("--families", "unrolled", "--budget", "20", "--json", "--quiet")
    assert tune(tmp_path, weights, "--emitter", emitter, "--trials", "proxy", *few) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert (manifest["emitter"], manifest["search"]["trials"]) == (emitter, "proxy")
    assert manifest["verified"]["on"] == "gpu" and manifest["verified"]["max_relative_error"] < 1e-6
    log = [json.loads(line) for line in (tmp_path / "kernel" / "tuning.jsonl").read_text().splitlines()]
    assert any(line["final_micros"] for line in log), "the kernels of some were timed"


def test_a_budget_bounds_the_timing(
    tmp_path: Path, weights: np.ndarray, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lospmm.tuning.budget.LEAST_SEARCH_SECONDS", 0.0)
    assert tune(tmp_path, weights, "--budget", "0.001", "--json", "--quiet") == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["search"]["measured"] == 1
    assert manifest["measured"]["micros"] > 0


def test_verification_alone(tmp_path: Path, weights: np.ndarray, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--measure", "none", "--verify", "gpu", "--json", "--quiet")
    assert tune(tmp_path, weights, *options) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert (manifest["measured"], manifest["verified"]["on"]) == (None, "gpu")
    assert manifest["search"]["chosen_by"] in ("estimate", "model")
