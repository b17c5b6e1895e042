"""benchmarks/families.py with invented times in a GPU's place: what it builds, writes, resumes and sums up."""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

from benchmarks import families, families_build, families_cases, families_plot, families_table
from benchmarks.families_build import Shortlist
from benchmarks.families_cases import SETS, Case, problem_of
from benchmarks.families_table import ROUNDED, Record, key, read_results, summary, winner, write_results
from benchmarks.families_unrolled import CANDIDATES
from lospmm.errors import BadRequest
from lospmm.families import FAMILIES
from lospmm.gpu.bench import Bench

CASE = Case("map", "64 x 64, 90% zeros", (64, 64, 0.9), 32, "float16", "h200")
CONTEXT: Record = {"machine": {"device": "h200", "title": "H200"}, "versions": {}, "commit": "0123abc"}


@pytest.fixture(autouse=True)
def _no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mpl.rcParams, "backend", "agg")


def record(**changes: Any) -> Record:
    times = {"csr": 20.0, "hyb": 10.0}
    line: Record = {
        "set": "map",
        "name": "512 x 512",
        "n": 128,
        "dtype": "float16",
        "problem": "512 x 512, n 128, float16",
        "m": 512,
        "k": 512,
        "nnz": 5243,
        "sparsity": 0.98,
        "bound_micros": 2.0,
        "bound_by": "memory",
        "families": {name: {"plans": 2, "failures": [], "micros": micros} for name, micros in times.items()},
        "baselines": {"cusparse": {"micros": 40.0}, "cublas_fp16": {"micros": 15.0}},
        "refused": {},
        **CONTEXT,
    }
    return line | changes


def test_every_case_is_a_problem_of_its_own() -> None:
    for name, cases_of in SETS.items():
        if name == "real":
            with pytest.raises(BadRequest, match="--layers"):
                cases_of("h200", None)
            continue
        cases = cases_of("h200", None)
        assert len({key(asdict(case) | CONTEXT) for case in cases}) == len(cases)
        assert {case.set for case in cases} == {name}
    assert len(SETS["shapes"]("h200", None)) == 41 * 2 * 4
    assert len(SETS["llm"]("h200", None)) == 2 * 2 * 4


def test_real_layers_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.smtx").write_text("2, 3, 2\n0 1 2\n0 2\n")
    cases = families_cases.real("h200", tmp_path)
    assert [(case.name, case.dtype) for case in cases] == [
        ("a.smtx", dtype) for dtype in ("float16", "float32", "bfloat16")
    ]
    assert problem_of(cases[0]).matrix.nnz == 2


@pytest.mark.slow
def test_a_problem_is_built_and_timed(tmp_path: Path) -> None:
    """All families, in the process of ``benchmarks.dry_gpu``; no kernel is left in the folder."""
    case = replace(CASE, set="shapes")
    prepared = families_build.prepare(case, Shortlist(1, far=float("inf")), tmp_path)
    assert not [one.failure for one in prepared.built if one.kernel is None]
    assert {one.family for one in prepared.built} | set(prepared.refused) == {*FAMILIES, "unrolled", ROUNDED}
    with Bench(prepared.problem, command=(sys.executable, "-P", "-m", "benchmarks.dry_gpu")) as bench:
        line = families.line_of(case, CONTEXT, prepared, bench)
    for name, found in line["families"].items():
        assert found["micros"] > 0 and not found["failures"], name
        assert 1 <= len(found["brief"]) <= (1 if name in FAMILIES else CANDIDATES)
    assert key(line) == key(asdict(case) | CONTEXT)
    assert line["baselines"]["cusparse"] == {"micros": 100.0}
    assert winner(line) is not None
    assert line["cache"] == "cold"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_cell_of_the_map_takes_less(tmp_path: Path) -> None:
    """No kernel whose sums have 16 bits, and no cuSPARSE."""
    prepared = families_build.prepare(CASE, Shortlist(1, far=float("inf")), tmp_path)
    with Bench(prepared.problem, command=(sys.executable, "-P", "-m", "benchmarks.dry_gpu")) as bench:
        line = families.line_of(CASE, CONTEXT, prepared, bench)
    assert "unrolled" in line["families"] and ROUNDED not in line["families"]
    assert line["baselines"] == {"cublas_fp16": {"micros": 100.0}}


@pytest.mark.slow
def test_what_is_far_behind_is_left_out(tmp_path: Path) -> None:
    """But for real layers."""
    drawn, real = (
        families_build.prepare(replace(CASE, set=name), Shortlist(1, far=0.0), tmp_path) for name in ("map", "real")
    )
    assert len({one.family for one in drawn.built} - {"unrolled", ROUNDED}) == 1  # the nearest
    assert sum("a forecast of" in why for why in drawn.refused.values()) >= 2
    assert {one.family for one in real.built} >= {"csr", "hyb"}


def test_some_families_alone_join_the_line_that_there_is(tmp_path: Path) -> None:
    prepared = families_build.prepare(CASE, Shortlist(1, far=float("inf"), families=("csr",)), tmp_path)
    assert {one.family for one in prepared.built} == {"csr"}
    before = record(refused={"csr": "a forecast of 90.0 us", "tensor_core": "no plan"}, families={"hyb": {"plans": 1}})
    after = families.joined(before, record(families={"csr": {"plans": 1}}, commit="4567def", baselines={}))
    assert after["families"] == {"hyb": {"plans": 1}, "csr": {"plans": 1, "commit": "4567def"}}
    assert after["refused"] == {"tensor_core": "no plan"}
    assert after["commit"] == before["commit"]


@pytest.mark.parametrize(("micros", "beside"), [(5.0, 16.0), (12.0, 15.0)])
def test_dense_counts_as_it_was_beside_the_fastest_kernel(micros: float, beside: float) -> None:
    """Its time differs from run to run."""
    again = record(families={"csr": {"plans": 1, "micros": micros}}, baselines={"cublas_fp16": {"micros": 16.0}})
    after = families.joined(record(), again)
    assert families_table.dense_micros(after) == beside


@pytest.mark.slow
def test_one_family_is_timed_beside_dense_alone(tmp_path: Path) -> None:
    prepared = families_build.prepare(CASE, Shortlist(2, far=float("inf"), families=("csr",)), tmp_path)
    case = replace(CASE, set="shapes")
    with Bench(prepared.problem, command=(sys.executable, "-P", "-m", "benchmarks.dry_gpu")) as bench:
        line = families.line_of(case, CONTEXT, prepared, bench, beside=False)
    assert line["baselines"] == {"cublas_fp16": {"micros": 100.0}} and len(line["families"]["csr"]["brief"]) == 2


def test_what_a_run_that_goes_on_leaves_out() -> None:
    """With families, what has them, or why they are refused; and all that has no line yet."""
    line = record(refused={"tensor_core": "no plan"})
    assert [families.is_missing(before, []) for before in (None, line)] == [True, False]
    assert [families.is_missing(line, [name]) for name in ("csr", "tensor_core", "bitmap")] == [False, False, True]
    assert families.is_missing(line, ["csr", "bitmap"]) and not families.is_missing(None, ["bitmap"])


def test_a_large_matrix_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families_cases, "WORTH_KEEPING", 1)
    source = (96, 64, 0.75)
    families_cases.draw(source)
    drawn = families_cases.matrix_of(source)
    monkeypatch.setattr(families_cases, "uniform", None)  # not drawn again
    families_cases.matrix_of.cache_clear()
    assert families_cases.matrix_of(source) == drawn
    assert drawn.nnz == 96 * 64 // 4


def test_layers_of_language_models_are_timed_with_a_from_memory() -> None:
    assert [replace(CASE, set=name).cache for name in ("llm", "map")] == ["streamed", "cold"]


@pytest.mark.slow
def test_unrolled_takes_part_in_float32(tmp_path: Path) -> None:
    case = Case("map", "64 x 64, 90% zeros", (64, 64, 0.9), 32, "float32", "h200")
    last = families_build.prepare(case, Shortlist(1), tmp_path).built[-1]
    assert (last.family, last.failure) == ("unrolled", None)
    assert last.kernel is not None


def test_a_plan_that_does_not_build_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no such\nplan")

    monkeypatch.setattr(families_build, "compile_kernel", broken)
    built = families_build.prepare(CASE, Shortlist(1), tmp_path).built
    assert {one.failure for one in built if one.family in FAMILIES} == {"RuntimeError: no such plan"}
    found = families.timed_family(None, built[:1])  # type: ignore[arg-type]
    assert found["failures"] and "micros" not in found


def test_results_are_kept_by_problem(tmp_path: Path) -> None:
    path = tmp_path / "families.jsonl"
    assert read_results(path) == {}
    lines = {key(one): one for one in (record(), record(n=16), record(dtype="float32"))}
    write_results(path, lines)
    assert read_results(path) == lines
    path.write_text("{}\n")
    with pytest.raises(BadRequest, match="not the lines"):
        read_results(path)


def test_the_summary_says_who_won() -> None:
    shapes = [
        record(set="shapes"),
        record(set="shapes", name="b", families={"csr": {"plans": 1, "failures": [], "micros": 30.0}}),
    ]
    wrong = record(set="real", families={"csr": {"plans": 1, "failures": ["Plan(): rows not written"]}})
    text = summary([record(), *shapes, record(set="graphs"), wrong])
    assert "map         1 problems: hyb 1" in text
    assert "the fastest of none: csr" in text
    assert "98% float16   2 shapes: 0.87x dense, least 0.50; with dense as a choice 1.22x, aimed at 1.8" in text
    assert "fastest family against cuSPARSE: 4.00x to 4.00x, mean 4.00x" in text
    assert "csr: right on 0 of 1" in text and "rows not written" in text
    assert winner(shapes[1]) == ("dense", 15.0)
    assert families_table.best_sparse(wrong) is None


def test_the_map_is_drawn(tmp_path: Path) -> None:
    lines = [record(n=n, sparsity=sparsity) for n in (16, 128) for sparsity in (0.9, 0.98)]
    families_plot.plot_map(
        [*lines, record(families={"new": {"plans": 1, "failures": [], "micros": 1.0}}, m=1024)], tmp_path / "map.png"
    )
    assert (tmp_path / "map.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("dtype", "others"), [("float32", ("cublas_fp32",)), ("float16", ("cublas_fp16", "cusparselt_fp16"))]
)
def test_dense_and_pruned_are_of_the_same_type(dtype: str, others: tuple[str, ...]) -> None:
    case = Case("graphs", "R-MAT 2^16", (1024, 1024, 0.99), 32, dtype, "h200")
    assert families.baselines_for(problem_of(case)) == ("cusparse", *others)
