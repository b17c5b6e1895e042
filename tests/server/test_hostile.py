"""Hundreds of hostile uploads to a real server; ``benchmarks.service hostile`` sends ten thousand, and the largest."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.serving import hostile, large
from benchmarks.serving.files import FAMILIES
from tests.server.processes import SERVE, serving

pytestmark = pytest.mark.slow

UPLOADS = 400


def test_each_is_refused_for_a_reason(tmp_path: Path, set_environment: Callable[[str, object], None]) -> None:
    for name, value in hostile.SETTINGS.items():
        set_environment(name, value)
    with serving(tmp_path, (*SERVE, "--workers", "0")) as (server, port):
        (record,) = hostile.siege(port, server.pid, uploads=UPLOADS)  # asserts for each answer
        assert server.poll() is None
    assert record["uploads"] >= UPLOADS
    assert len(record["families"]) > len(FAMILIES)  # nearly all of them, forms, parameters and lengths
    assert set(record["statuses"]) <= {"0", "400", "408", "413", "415", "422"}  # 0: clients that leave
    assert record["peak_megabytes"] < hostile.MEMORY_BYTES / 1e6


def test_the_largest_files_are_not_held(tmp_path: Path) -> None:
    """Neither by the error that one raised, nor by the heap; three at once are read one after the other."""
    with serving(tmp_path, (*SERVE, "--workers", "0")) as (server, port):
        before = hostile.Memory(server.pid).now()
        for name, times in (("dense, many nonzeros", 3), ("DIA", 1), ("smtx", 1)):
            hostile.answered(port, [hostile.large(large.REFUSED[name]())] * times)
            memory = hostile.Memory(server.pid)
            assert memory.peak() < hostile.MEMORY_BYTES, name
            assert memory.now() < before + 100e6, name
