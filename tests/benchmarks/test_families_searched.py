"""benchmarks/families_searched.py with invented times in a GPU's place: what it searches, joins and sums up."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import families_searched
from benchmarks.families_build import UNROLLED
from benchmarks.families_cases import Case, problem_of
from benchmarks.families_searched import joined, line_of, prepare, problems_of, table
from benchmarks.families_table import ROUNDED, Record
from lospmm.errors import BadRequest
from lospmm.gpu.bench import Bench
from lospmm.problem.lanes import NARROW, PAIRS, SINGLE, lanes_of
from lospmm.store import Store
from lospmm.tuning.builders import BuilderPool
from lospmm.tuning.race import POLICIES

CASE = Case("shapes", "128 x 96, 98% zeros", (128, 96, 0.98), 1024, "float16", "h200")
BOTH = ("float32", "16")


def test_a_row_for_each_kind_of_sum() -> None:
    found = problems_of(CASE, BOTH)
    assert {row: lanes_of(problem) for row, problem in found.items()} == {UNROLLED: NARROW, ROUNDED: PAIRS}
    assert set(problems_of(CASE, ("float32",))) == {UNROLLED}
    tf32 = Case(CASE.set, CASE.name, CASE.source, CASE.n, "tf32", CASE.device)
    assert {row: lanes_of(problem) for row, problem in problems_of(tf32, BOTH).items()} == {UNROLLED: SINGLE}


@pytest.mark.slow
def test_a_search_by_time_is_timed_beside_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = replace(POLICIES["full"], rounds=2)
    monkeypatch.setattr(families_searched, "POLICIES", {"full": policy})
    command = (sys.executable, "-P", "-m", "benchmarks.dry_gpu")
    with BuilderPool(2) as builders, Bench(problem_of(CASE), command=command) as bench:
        line = line_of(CASE, prepare(CASE, BOTH), bench, builders, Store(tmp_path))
    assert set(line["families"]) == {UNROLLED, ROUNDED}
    assert line["baselines"] == {"cublas_fp16": {"micros": 100.0}}
    exact, rounded = line["families"][UNROLLED], line["families"][ROUNDED]
    assert exact["by"] == rounded["by"] == "search" and not exact["failures"]
    assert policy.rounds * policy.batch < exact["plans"]
    assert exact["doubles"][0] > 0 and exact["doubles"][1] is not None and rounded["doubles"][:2] == [0, None]
    for found in (exact, rounded):
        ((forecast, micros),) = found["brief"]
        assert forecast > 0 and 0 < found["micros"] <= micros * 1.001


def record(micros: float, dense: float, sparsity: float = 0.98) -> Record:
    families = {UNROLLED: {"micros": micros}, ROUNDED: {"failures": ["x"]}}
    return {
        "dtype": "float16",
        "sparsity": sparsity,
        "families": families,
        "baselines": {"cublas_fp16": {"micros": dense}},
    }


def test_a_line_keeps_what_was_not_timed_again() -> None:
    before: Record = {"families": {"csr": {"micros": 9.0}, UNROLLED: {"micros": 8.0}}, "baselines": {"cusparse": {}}}
    after = joined(before, record(4.0, 8.0), "abc")
    assert after["families"]["csr"] == {"micros": 9.0}
    assert after["families"][UNROLLED] == {"micros": 4.0, "commit": "abc"}
    assert set(after["baselines"]) == {"cusparse", "cublas_fp16"}


def test_the_table_has_means_by_type_and_sparsity() -> None:
    text = table([record(4.0, 8.0), record(4.0, 2.0), record(5.0, 5.0, 0.95)])
    assert text.splitlines() == [
        "float16 95% unrolled: 1 shapes, 1.000x dense, least 1.00, greatest 1.00; with dense as a choice 1.000x",
        "float16 98% unrolled: 2 shapes, 1.000x dense, least 0.50, greatest 2.00; with dense as a choice 1.414x",
    ]


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_gpu() -> None:
        raise BadRequest("this machine has no GPU")

    monkeypatch.setattr(families_searched, "detect_device", no_gpu)
    monkeypatch.setattr(sys, "argv", ["families_searched", "--out", str(tmp_path), "--only", "nothing"])
    with pytest.raises(SystemExit, match=r"benchmarks\.families_searched: this machine has no GPU"):
        families_searched.main()
