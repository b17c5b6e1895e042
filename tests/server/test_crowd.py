"""Many clients at once, and many requests a second; ``benchmarks.service crowd`` and ``rate`` have the figures."""

from pathlib import Path

import pytest

from benchmarks.serving import crowd, rate
from tests.server.processes import serving

pytestmark = pytest.mark.slow


def test_matrices_that_many_post_at_once_are_tuned_once(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, port):
        record = crowd.gather(port, clients=40, matrices=8)  # asserts for each client
    assert (record["tuned"], record["right_answers"], record["distinct_cubins"]) == (8, 40, 8)


def test_kernels_that_are_there_are_sent_by_the_hundred(tmp_path: Path) -> None:
    """How many a second depends on who else uses the machine; here none may fail, and all are counted."""
    with serving(tmp_path) as (_, port):
        closed, *opened = rate.measure(port, repeats=1, seconds=0.5)
    assert closed["middle"]["requests_per_second"] > 100
    assert [run["middle"]["requests"] for run in opened] == [pace * 0.5 for pace in rate.RATES]
