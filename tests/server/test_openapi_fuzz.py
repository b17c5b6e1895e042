"""schemathesis against the OpenAPI of a real server, for seconds; ``benchmarks.service fuzz`` does it for minutes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.service import FUZZED
from benchmarks.serving.fuzz import fuzz
from lospmm_server.app import ROUTERS
from tests.server.processes import serving

pytestmark = pytest.mark.slow

#: Enough for every operation; and where others use this machine too.
SECONDS = (8, 75)
LEAST_REQUESTS = 200


def test_no_unexpected_answer(tmp_path: Path, set_environment: Callable[[str, object], None]) -> None:
    for name, value in FUZZED.items():
        set_environment(name, value)
    with serving(tmp_path) as (server, port):
        for seconds in SECONDS:
            report = fuzz(port, tmp_path, examples=10, seed=0, seconds=seconds)
            if report.failures or (report.tested == report.operations and report.requests > LEAST_REQUESTS):
                break
        assert server.poll() is None
    assert report.failures == []
    assert report.tested == report.operations == sum(len(router.routes) for router in ROUTERS)
    assert report.requests > LEAST_REQUESTS
    assert report.accepted > 0
