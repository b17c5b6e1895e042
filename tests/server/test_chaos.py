"""A batch goes on to its end whatever is killed: the short version of ``benchmarks.service chaos``."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.serving import chaos
from benchmarks.serving.chaos import ENDLESS_ATTEMPTS, Plan


@pytest.mark.slow
def test_random_kills_of_server_and_workers(tmp_path: Path, set_environment: Callable[[str, object], None]) -> None:
    set_environment("LOSPMM_MAX_ATTEMPTS", ENDLESS_ATTEMPTS)
    plan = Plan(layers=3, kills=3, side=512, pause_seconds=0.6)
    record = chaos.storm(plan, tmp_path)  # asserts that nothing is lost and nothing is done twice
    assert sum(record["kills"].values()) == plan.kills
    assert record["artifacts_verified"] == record["succeeded_events"] == plan.layers
