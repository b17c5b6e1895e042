"""benchmarks/kernels.py with an invented tuner and invented times: no GPU."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import kernels
from benchmarks.harness import part
from benchmarks.kernels_plot import STYLES, plot_bound, plot_speedups
from benchmarks.kernels_table import (
    Record,
    current,
    geometric_mean,
    mean_ratio,
    measured_of,
    ratios,
    summary,
)
from lospmm.errors import BadRequest, VerificationFailed
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.device import DEVICES
from lospmm.tuning import jobs
from lospmm.tuning.options import Options
from tests.docs import kernels as page

CONTEXT: Record = {
    "machine": {"device": "h200", "title": "H200", "system": "Linux", "cores": 2},
    "versions": {"driver": "580.1"},
    "commit": "0123abc",
    "options": {"measure": "gpu", "emitter": "sass", "budget": None, "shortlist_size": 10},
}
MEASURED = {
    "micros": 20.0,
    "spread": 0.01,
    "noise": 0.004,
    "bound_micros": 8.0,
    "cusparse_micros": 120.0,
    "cusparse_algorithm": "CSR_ALG3",
    "cusparse_alg2_micros": 150.0,
    "cublas_fp32_micros": 100.0,
    "cublas_tf32_micros": 30.0,
    "advice": "sparse",
    "clocks": None,
}


@pytest.fixture(autouse=True)
def _no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mpl.rcParams, "backend", "agg")


def manifest(m: int, k: int, n: int, nnz: int, **times: Any) -> dict[str, Any]:
    return {
        "m": m,
        "k": k,
        "n": n,
        "nnz": nnz,
        "fingerprint": "f",
        "cubin_family": "unrolled",
        "emitter": "sass",
        "toolchain": "none",
        "tile": {"rows": 48},
        "launch": {"block": 512},
        "registers": 128,
        "code_bytes": 1000,
        "verified": {"on": "gpu", "max_relative_error": 3e-7},
        "seconds": {"total": 1.23456},
        "measured": {**MEASURED, **times},
    }


def tune(matrix: SparseMatrix, _values: str, n: int) -> Mapping[str, Any]:
    return manifest(matrix.m, matrix.k, n, matrix.nnz)


def case(problem: str = "one", zeros: float = 0.5) -> kernels.Case:
    matrix = from_dense(np.eye(4, dtype=np.float32))
    return kernels.Case("seven", problem, 64, lambda: (matrix, "stored"), {"drawn_sparsity": zeros})


def invented(group: str, problem: str, zeros: float, **times: Any) -> Record:
    about = {"set": group, "problem": problem, **CONTEXT, "drawn_sparsity": zeros, "wall_seconds": 1.0}
    return {**about, **kernels.figures(manifest(100, 100, 64, round(10_000 * (1 - zeros)), **times))}


def failure(group: str, problem: str, zeros: float) -> Record:
    return {"set": group, "problem": problem, **CONTEXT, "drawn_sparsity": zeros, "failure": "GpuFault: hung"}


def test_the_sets_hold_7_and_205_problems_each_with_a_name_of_its_own() -> None:
    for name, count in (("seven", 7), ("shapes", 205)):
        cases = kernels.cases_of([name], None)
        assert len({kernels.case_key(one, CONTEXT) for one in cases}) == count
        assert {one.set for one in cases} == {name}
    matrix, values = kernels.seven()[2].matrix()
    assert (matrix.m, matrix.k, values) == (768, 768, "stored")
    assert matrix.sparsity == pytest.approx(0.98, abs=1e-4)
    cases = kernels.cases_of([], None)
    assert len(cases) == 212
    assert sorted(len(cases[part(f"{gpu}/3")]) for gpu in range(3)) == [70, 71, 71]


def test_real_layers_need_a_folder_that_holds_some(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="--layers DIR"):
        kernels.cases_of(["real"], None)
    with pytest.raises(BadRequest, match=r"no \.smtx or \.npz"):
        kernels.cases_of(["real"], tmp_path)
    (tmp_path / "rn50").mkdir()
    (tmp_path / "rn50" / "a.smtx").write_text("2, 2, 2\n0 1 2\n0 1\n")
    (tmp_path / "rn50_batchsizes.txt").write_text("a,49\n")
    (one,) = kernels.cases_of(["real"], tmp_path)
    assert (one.problem, one.n) == ("rn50/a.smtx, n 49", 49)
    matrix, values = one.matrix()
    assert (matrix.nnz, values) == (2, "drawn")
    named = kernels.cases_of(["real"], tmp_path, (128, 256))
    assert [(other.problem, other.n) for other in named] == [("rn50/a.smtx, n 128", 128), ("rn50/a.smtx, n 256", 256)]


def test_ratios_are_those_of_the_times() -> None:
    found = ratios({**MEASURED, "micros": 25.9, "sputnik_micros": 51.8})
    assert found["sputnik"] == 2.0
    assert found["cusparse"] == pytest.approx(120 / 25.9, abs=1e-4)
    assert found["cusparse_alg2"] == pytest.approx(150 / 25.9, abs=1e-4)
    assert found["bound"] == pytest.approx(8 / 25.9, abs=1e-4)
    missing = dict.fromkeys(("cusparse_micros", "cusparse_alg2_micros", "cublas_tf32_micros"))
    assert ratios({**MEASURED, **missing}).keys() == {
        "cublas_fp32",
        "bound",
    }


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30), st.floats(0.01, 100))
def test_the_geometric_mean(values: list[float], factor: float) -> None:
    mean = geometric_mean(values)
    assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)
    assert geometric_mean([factor * value for value in values]) == pytest.approx(factor * mean)
    assert geometric_mean([1 / value for value in values]) == pytest.approx(1 / mean)


def test_means_leave_out_failures_and_baselines_without_a_time() -> None:
    records = [
        invented("seven", "a", 0.9, cusparse_micros=40.0),
        invented("seven", "b", 0.9, cusparse_micros=160.0),
        invented("seven", "c", 0.9, cusparse_micros=None),
        failure("seven", "d", 0.9),
    ]
    assert mean_ratio(records, "cusparse") == pytest.approx(4.0)
    assert mean_ratio(records, "cublas_fp32") == pytest.approx(5.0)
    assert mean_ratio(records[2:], "cusparse") is None
    assert len(measured_of(records)) == 3


def test_the_summary_has_a_line_per_problem_and_means_by_sparsity() -> None:
    records = [invented("shapes", f"{zeros:.0%}", zeros) for zeros in (0.7, 0.9)] + [failure("shapes", "bad", 0.9)]
    lines = summary(records).splitlines()
    assert lines[1].split()[:3] == ["shapes", "us", "noise"]
    assert lines[2].split() == ["70%", "20.00", "0.4%", "6.00", "5.00", "1.50", "0.40"]
    assert lines[4].split() == ["bad", "FAILED:", "GpuFault:", "hung"]
    means = [line.split("  ")[0] for line in lines if line.startswith("geometric")]
    assert means == [f"geometric mean of {text}" for text in ("1, 70%", "1, 90%", "2")]
    assert lines[-2:] == ["2 measured at 0123abc, 1 failed", "greatest error relative to |A||B|: 3.0e-07"]


def test_a_problem_that_fails_is_a_line_and_the_others_go_on(tmp_path: Path) -> None:
    def faulty(*_: Any) -> Mapping[str, Any]:
        raise errors.pop()

    errors: list[Exception] = [ZeroDivisionError("a bug"), VerificationFailed("rows 1\nand 2 differ")]
    path = tmp_path / "out" / "kernels.jsonl"
    assert kernels.measure([case("one"), case("two")], CONTEXT, faulty, path) == 2
    assert kernels.measure([case("three")], CONTEXT, tune, path) == 1
    one, two, three = map(json.loads, path.read_text().splitlines())
    assert one["failure"] == "VerificationFailed: rows 1 and 2 differ"
    assert two["failure"] == "ZeroDivisionError: a bug"
    assert three["ratios"]["cusparse"] == 6.0 and three["max_relative_error"] == 3e-7
    assert three["seconds"] == {"total": 1.235} and three["commit"] == "0123abc"
    assert kernels.report([case("three")], CONTEXT, path) == 0
    assert kernels.report([case("one"), case("three")], CONTEXT, path) == 1
    assert list(path.parent.glob("*.part")) == []


def test_a_kernel_that_was_not_measured_is_a_failure() -> None:
    record = kernels.line_of(case(), CONTEXT, lambda *_: {**manifest(4, 4, 64, 4), "measured": None})
    assert record["failure"] == "BadRequest: the kernel was tuned, but nothing was measured"


def test_resume_leaves_out_what_has_a_time_under_the_same_conditions(tmp_path: Path) -> None:
    path = tmp_path / "kernels.jsonl"
    cases = [case("one"), case("two"), case("three")]
    kernels.measure(cases[:1], CONTEXT, tune, path)
    kernels.measure(cases[1:2], CONTEXT, lambda *_: {}, path)  # fails
    results = kernels.read_results(path)
    assert [one.problem for one in kernels.missing(cases, CONTEXT, results)] == ["two", "three"]
    assert kernels.missing(cases[:1], {**CONTEXT, "commit": "another", "versions": {}}, results) == []
    for changed in ({"options": {**CONTEXT["options"], "emitter": "ptx"}}, {"machine": {"device": "a100"}}):
        assert kernels.missing(cases[:1], {**CONTEXT, **changed}, results) == cases[:1]


def test_while_one_problem_is_tuned_the_next_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int]] = []
    monkeypatch.setattr(jobs, "search_ahead", lambda one, **_: done.append(("search", one.problem.n)))
    monkeypatch.setattr(jobs, "tune", lambda one, **_: done.append(("tune", one.problem.n)) or Mock())
    cases = [replace(case(), n=n) for n in (32, 64, 96)]
    with kernels.searched(DEVICES["h100"], Options(measure="gpu"), cases) as tune:
        for one in cases:
            tune(*one.matrix(), one.n)
    assert done == [("search", 64), ("tune", 32), ("search", 96), ("tune", 64), ("tune", 96)]


def test_a_run_stops_in_time_and_replaces_lines(tmp_path: Path) -> None:
    path = tmp_path / "kernels.jsonl"
    assert kernels.measure([case("one"), case("two")], CONTEXT, tune, path, stop_after=0) == 0
    assert not path.exists()
    kernels.measure([case("one"), case("two")], CONTEXT, tune, path)
    kernels.measure([case("one")], {**CONTEXT, "commit": "later"}, tune, path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["problem"], line["commit"]) for line in lines] == [("two", "0123abc"), ("one", "later")]


def test_a_run_goes_on_where_another_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernels.jsonl"
    cases = [case("one"), case("two"), case("three")]
    tuned: list[int] = []

    def failing_second(matrix: SparseMatrix, values: str, n: int) -> Mapping[str, Any]:
        tuned.append(n)
        if len(tuned) == 2:
            raise VerificationFailed("rows differ")
        return tune(matrix, values, n)

    assert kernels.run(cases[:2], CONTEXT, failing_second, path, done={}) == 1
    assert kernels.run(cases, CONTEXT, failing_second, path, done=kernels.read_results(path), stop_after=0) == 0
    assert "2 problems were not begun" in (told := capsys.readouterr()).err
    assert "1 measured at 0123abc, 1 failed" in told.out and "1 measured at 0123abc, 0 failed" in told.out
    assert kernels.run(cases, CONTEXT, failing_second, path, done=kernels.read_results(path)) == 0
    assert len(tuned) == 4
    assert {file.name for file in tmp_path.iterdir()} == {"kernels.jsonl", "kernels_speedup.png", "kernels_bound.png"}


@pytest.mark.parametrize("text", ["{", "[]\n", '{"set": "seven"}\n', "1\n"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kernels.jsonl"
    path.write_text(text)
    with pytest.raises(BadRequest, match="not the lines of this benchmark"):
        kernels.read_results(path)


def test_only_lines_of_the_newest_conditions_stand_together() -> None:
    old = {**invented("seven", "a", 0.9), "machine": {"device": "a100"}}
    other_set = {**invented("shapes", "a", 0.9), "options": {"measure": "gpu"}}
    newest = invented("seven", "a", 0.9)
    assert current([old, other_set, newest]) == [other_set, newest]


def test_plots_are_drawn_from_any_lines(tmp_path: Path) -> None:
    networks = ("BERT-base", "ResNet-50", "ShuffleNetV2", "MobileNetV2")
    records = [
        {**invented("shapes", f"{name} {zeros}", zeros, micros=30 * (1.2 - zeros)), "network": name}
        for name in networks
        for zeros in (0.7, 0.8, 0.9, 0.95, 0.98)
    ]
    real = invented("real", "r", 0.87, cusparse_micros=None)
    del real["drawn_sparsity"]
    records += [invented("seven", "s", 0.9), real, failure("shapes", "f", 0.9)]
    for number, drawn in enumerate((records, records[-3:], [])):
        for plot in (plot_speedups, plot_bound):
            path = tmp_path / f"{plot.__name__}{number}.png"
            plot(drawn, path)
            assert path.read_bytes().startswith(b"\x89PNG") and 5_000 < path.stat().st_size < 300_000


def test_every_network_of_the_shapes_has_a_style() -> None:
    assert {one.labels["network"] for one in kernels.shapes()} <= STYLES.keys()


def test_the_page_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "records", lambda _: [])
    assert page.conditions([]) == page.short() == page.NOTHING
    first, second = (one.problem for one in kernels.seven()[:2])
    records = [invented("seven", first, 0.7), failure("seven", second, 0.9)]
    records += [invented("shapes", f"x{zeros}", zeros) for zeros in (0.7, 0.9, 0.9)]
    monkeypatch.setattr(page, "records", lambda _: records)
    assert f"| {first} | 20.0 | 6.00 | 5.00 | 1.50 | 0.40 |" in page.short()
    assert f"| {second} | failed | - |" in page.short()
    assert "| shapes at 90% | 2 | 6.00 |" in page.means() and "| all shapes | 3 |" in page.means()
    measured = " ".join(page.means().split())
    assert "H200, driver 580.1. Commits and greatest noise: the seven problems `0123abc`" in measured
    assert "0.4%, 1 failed; all shapes" in measured


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git on this machine")
def test_the_commit_is_told_with_what_differs_from_it(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    assert kernels.commit_of(tmp_path) == "unknown"  # nothing is committed
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    clean = kernels.commit_of(tmp_path)
    assert len(bytes.fromhex(clean)) == 20
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "kernels.jsonl").write_text("")
    assert kernels.commit_of(tmp_path) == clean
    (tmp_path / "a").write_text("2")
    assert kernels.commit_of(tmp_path) == f"{clean}+dirty"


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise BadRequest("no GPU here")

    monkeypatch.setattr(kernels, "detect_device", refuse)
    monkeypatch.setattr(sys, "argv", ["kernels", "--set", "seven", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        kernels.main()
    assert str(stopped.value.code).startswith("benchmarks.kernels: ")
    assert list(tmp_path.iterdir()) == []
