"""benchmarks/skipping.py by times that are made up and by those that were recorded, and fitting/large.py without a
GPU."""

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from benchmarks import families, skipping
from benchmarks.families_build import UNROLLED, Prepared
from benchmarks.families_cases import problem_of
from benchmarks.families_table import family_micros
from benchmarks.skipping import Judged, gain_of, judged_of, row_of
from fitting import large
from lospmm.errors import BadRequest
from lospmm.gpu.bench import Bench
from lospmm.problem.device import DEVICES
from lospmm.tuning.forecast import FAR, LEAST_NONZEROS
from lospmm.tuning.race import LOST

H200 = DEVICES["h200"]


def test_what_is_left_out_is_counted() -> None:
    found = Judged(
        nonzeros=np.array([100, 200, 300, 400]),
        forecasts=np.array([[10.0, 30.0, 30.0, 9.0], [30.0, 30.0, 30.0, 9.0]]),
        unrolled=np.array([9.0, 10.5, 40.0, 9.0]),
        others=np.full(4, 10.0),
    )
    row = row_of(found, 0, 2.0)
    assert (row.problems, row.skipped, row.fastest, row.near) == (4, 2.5, 0.5, 1.5)
    assert row.least_ratio == 0.9 and row.share_of_nonzeros == pytest.approx((500 + 600) / 2 / 1000)
    large_ones = row_of(found, 300, 2.0)
    assert (large_ones.problems, large_ones.skipped, large_ones.near, large_ones.least_ratio) == (2, 1.0, 0.0, 4.0)
    assert row_of(found, 0, 9.0).least_ratio == float("inf")


@pytest.mark.slow
def test_what_is_shipped_leaves_no_winner_out() -> None:
    """By forecasts that saw no A of a problem's size; of the large ones with a wide margin."""
    found = judged_of(H200)
    every, large_ones = (row_of(found, least, FAR) for least in (0, LEAST_NONZEROS))
    assert every.problems > 600 and every.fastest == every.near == 0 and every.least_ratio > 1.3
    assert large_ones.problems > 30 and large_ones.near == 0 and large_ones.least_ratio > 1.5
    assert large_ones.skipped > 0.3 * large_ones.problems
    near = row_of(found, LEAST_NONZEROS, 0.85 * FAR)
    assert near.near == 0, "a little less would be right, too"


def test_a_lost_search_would_find_nothing() -> None:
    assert gain_of(H200, 200_000).greatest < LOST


@pytest.mark.slow
def test_a_large_problem_is_built_in_parts_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "WORK", (((96, 80, 0.7), (64,), "float32"),))
    (case,) = large.cases_of("h200", "")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        (made,) = large.prepared(pool, [case], 3, tmp_path)
    assert not [one.failure for one in made.built if one.kernel is None]
    names = [one.family for one in made.built]
    assert names.count(UNROLLED) == 3 and len(set(names)) == 1 + large.OTHERS
    with Bench(problem_of(case), command=(sys.executable, "-P", "-m", "benchmarks.dry_gpu")) as bench:
        line = families.line_of(
            case, {"machine": {"device": "h200"}}, Prepared(problem_of(case), made.built, {}, 1.0), bench
        )
    assert set(family_micros(line)) == set(names) and line["set"] == "large"
    assert list(line["baselines"]) == ["cublas_fp32"] and not list(tmp_path.iterdir())
    assert large.cases_of("h200", "another") == []


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_gpu() -> None:
        raise BadRequest("this machine has no GPU")

    monkeypatch.setattr(large, "detect_device", no_gpu)
    monkeypatch.setattr(sys, "argv", ["large", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"fitting\.large: this machine has no GPU"):
        large.main()


@pytest.mark.slow
def test_the_tables_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["skipping", "--each"])
    skipping.main()
    printed = capsys.readouterr().out
    assert "4096 x 4096, 80% zeros, n 1024, float32: " in printed
    assert f" {FAR:.2f} " in printed and "fastest of 10" in printed
