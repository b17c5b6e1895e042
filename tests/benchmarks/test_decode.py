"""benchmarks/decode.py with invented times in a GPU's place: what a line tells, and what is made of the lines."""

import sys
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import pytest

from benchmarks import decode, families_build
from benchmarks.families import baselines_for
from benchmarks.families_build import Shortlist
from lospmm.gpu.bench import Bench
from lospmm.problem.device import DEVICES
from lospmm.problem.values import VALUE_TYPES
from tests.benchmarks.test_families_benchmark import CASE, CONTEXT, record


def test_the_problems_of_one_n_and_sparsity_come_together() -> None:
    cases = decode.cases_of("h200", (8, 1), (0.5, 0.7), ("float16",))
    assert [(case.n, case.name) for case in cases[4:6]] == [
        (8, "28672 x 8192, 50% zeros"),
        (8, "4096 x 4096, 70% zeros"),
    ]
    assert {case.cache for case in cases} == {"streamed"} and len(cases) == 20


def test_a_line_tells_of_the_fastest_kernel(tmp_path: Path) -> None:
    case = replace(CASE, set="decode")
    prepared = families_build.prepare(case, Shortlist(1, families=("csr",)), tmp_path)
    (size,) = [path.stat().st_size for path in tmp_path.iterdir()]
    with Bench(prepared.problem, command=(sys.executable, "-P", "-m", "benchmarks.dry_gpu")) as bench:
        line = decode.line(case, CONTEXT, prepared, bench)
    assert (line["family"], line["bytes"], line["cache"]) == ("csr", size, "streamed")
    assert line["micros"] == line["families"]["csr"]["micros"]
    assert line["baselines"] == {name: {"micros": 100.0} for name in ("cusparse", "cublas_fp16", "cusparselt_fp16")}
    coded, own = replace(prepared.problem, values=VALUE_TYPES["fp8_e4m3"]), baselines_for(prepared.problem)
    assert set(baselines_for(coded)) == {*own, "cublas_fp8"}
    least = 2 * line["nnz"] + 64 * 64 / 8 + 2 * 32 * (64 + 64)
    assert line["of_roof"] == round(least / DEVICES["h200"].memory_bandwidth * 1e6 / line["micros"], 3)


def test_the_summary_has_geometric_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"set": "decode", "n": 8, "sparsity": 0.7, "family": "csr", "of_roof": 0.5}
    lines = [record(**own, name=name, micros=micros) for name, micros in (("a", 15.0), ("b", 3.75))]
    assert decode.summary([*lines, record(set="decode", n=8, families={})]) == (
        "H200, float16, N    8, 70% zeros: 0.50 of the roof, 2.00x cuBLAS (2 shapes: csr)"
    )
    lines[0]["baselines"] |= {"cusparselt_fp16": {"micros": 12.0}}
    lines[1]["baselines"] |= {"cusparselt_fp16": {"failure": "takes n in multiples of 8"}}
    assert "2.00x cuBLAS, 0.80x cuSPARSELt (2 shapes" in decode.summary(lines)
    lines[0]["baselines"] |= {"cublas_int8": {"micros": 30.0}}
    assert "2.00x cuBLAS, 0.80x cuSPARSELt, 2.00x cuBLASLt of 8 bits (2 shapes" in decode.summary(lines)
    monkeypatch.setitem(mpl.rcParams, "backend", "agg")
    decode.plot(lines, tmp_path / "decode.png")
    assert (tmp_path / "decode.png").stat().st_size > 5_000
