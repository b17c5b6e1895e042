"""All attacks at once on a real service for half a minute, and a queue that many workers empty.

``benchmarks.service`` has the figures: each attack alone, the soak for an hour, 100 workers and 100,000 jobs. Others
use the machine here, so that nothing is said of times.
"""

import secrets

import pytest

from benchmarks.serving import claims, soak
from benchmarks.serving.attacks import CASES, MALFORMED
from tests.server.postgresql import Cluster

pytestmark = pytest.mark.slow


def test_a_broken_promise_is_noticed() -> None:
    case = CASES["malformed"]
    sound = {"sound_refused": 0, "p99_ms": 5000, "server_errors": 0}
    case.check(sound, times=False)
    for broken, times in ((sound, True), (sound | {"server_errors": 1}, False)):
        with pytest.raises(AssertionError):
            case.check(broken, times=times)
    assert len(MALFORMED) == 96


def test_all_attacks_at_once() -> None:
    record = soak.soak(15.0)
    soak.check(record, times=False)
    assert len(record["windows"]) == soak.WINDOWS
    assert {"refused", "malformed", "keys", "kill", "crowd", "fair"} <= set(record["seen"])
    rising = [{**row, "megabytes": 100 + 10 * at} for at, row in enumerate(record["windows"])]
    leak = {**record, "rises": record["rises"] | {"megabytes": soak.rise(rising, "megabytes")}}
    with pytest.raises(AssertionError):
        soak.check(leak, times=False)


def test_workers_empty_a_queue_and_do_nothing_twice(cluster: Cluster) -> None:
    record = claims.simulate(cluster.create_schema(f"claims{secrets.token_hex(8)}"), workers=8, jobs=400)  # asserts
    assert (record["jobs"], record["doubles"]) == (400, 0)
