"""What is written down of a tuning: the log has a line for each candidate, the manifest says how it was chosen."""

from dataclasses import replace

import numpy as np
import pytest

from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import Timing
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.estimate import estimate_micros
from lospmm.stages import Stages
from lospmm.tuning.known import Known
from lospmm.tuning.log import unrolled_log
from lospmm.tuning.options import Options
from lospmm.tuning.plans import plans_for
from lospmm.tuning.prepare import prepare
from lospmm.tuning.summary import search_summary
from lospmm.tuning.trial import Trial
from lospmm.tuning.unrolled import search
from tests.space.test_explore import random_matrix

PROBLEM = Problem(random_matrix(30, 40, 0.2, seed=4), 9000, DEVICES["h200"])
CHOICE = search(PROBLEM, estimate_micros, 5, Stages())
UNTIMED = replace(plans_for(PROBLEM, ("csr",)), choice=CHOICE)
RESOLVED = Options(ranker="none").resolved(DEVICES["h200"], None)


def timed() -> Known:
    """The second of the shortlist is the fastest, the third failed, the fourth was wrong."""
    results = [
        Measurement(Timing(20.0, 0.01, 15), 2e-7, None),
        Measurement(Timing(10.0, 0.02, 15), 3e-7, None),
        Measurement(None, None, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        Measurement(None, 0.5, "row 1, column 2: got 3"),
    ]
    return replace(UNTIMED, trials=tuple(map(Trial, CHOICE.shortlist, results)))


def test_without_times_the_log_is_the_shortlist() -> None:
    log, scores = unrolled_log(PROBLEM, UNTIMED), [one.score for one in CHOICE.shortlist]
    assert [line["rank"] for line in log] == [1, 2, 3, 4, 5]
    assert [line["score"] for line in log] == scores
    assert [line["estimated_micros"] for line in log] == pytest.approx(scores)
    assert all(line["measured_micros"] is None and "failure" not in line for line in log)
    assert np.all(np.diff(scores) >= 0)


def test_with_times_the_log_is_the_trials() -> None:
    log = unrolled_log(PROBLEM, timed())
    assert [line["measured_micros"] for line in log] == [20.0, 10.0, None, None]
    assert [line["spread"] for line in log] == [0.01, 0.02, None, None]
    assert [line["max_relative_error"] for line in log] == [2e-7, 3e-7, None, 0.5]
    assert [line["failure"] for line in log] == [None, None, "CUDA_ERROR_ILLEGAL_ADDRESS", "row 1, column 2: got 3"]
    for line, candidate in zip(log, CHOICE.shortlist, strict=False):
        tile, schedule = candidate.plan.tile, candidate.plan.schedule
        assert (line["family"], line["rows"], line["cols"]) == ("unrolled", *tile)
        assert (line["prefetch"], line["column_group"]) == (schedule.prefetch, schedule.column_group)


@pytest.mark.usefixtures("own_settings")
def test_the_manifest_says_why_no_proxy_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a layer has no unrolled kernels, the kernels of the others are timed."""
    by_proxy = replace(RESOLVED, emitter="ptx", measure="gpu", trials="proxy")
    assert search_summary(timed(), by_proxy, estimated_micros=1.0).trials == "proxy"
    monkeypatch.setenv("LOSPMM_MAX_UNROLLED_NONZEROS", "9")
    known = prepare(PROBLEM, by_proxy, Stages())
    known = replace(known, trials=(Trial(known.plans[0], Measurement(Timing(9.0, 0.01, 15), 1e-7, None)),))
    summary = search_summary(known, by_proxy, estimated_micros=9.0)
    assert (summary.trials, summary.families[0].name) == ("full", "unrolled")
    assert "more than the 9 of LOSPMM_MAX_UNROLLED_NONZEROS" in str(summary.families[0].refusal)


@pytest.mark.parametrize(
    ("known", "chosen_by", "trials", "measured", "place"),
    [(UNTIMED, "estimate", "none", 0, 0), (timed(), "measurement", "full", 4, 1)],
    ids=["estimate", "measurement"],
)
def test_the_manifest_says_how_it_was_chosen(
    known: Known, chosen_by: str, trials: str, measured: int, place: int
) -> None:
    estimated = unrolled_log(PROBLEM, known)[place]["estimated_micros"]
    assert isinstance(estimated, float)
    summary = search_summary(known, RESOLVED, estimated_micros=estimated)
    assert (summary.chosen_by, summary.trials, summary.measured) == (chosen_by, trials, measured)
    assert summary.estimated_micros == pytest.approx(CHOICE.shortlist[place].score)
    assert summary.shortlisted == 5
    found = {one.name: (one.timed, one.micros, one.refusal) for one in summary.families}
    assert found["csr"] == (0, None, None)
    assert summary.space >= summary.after_registers >= summary.after_utilization >= summary.after_balance > 0
