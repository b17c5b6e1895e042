"""Hundreds of hostile uploads to a real server; ``benchmarks.service hostile`` sends ten thousand, and the largest."""

from collections.abc import Callable
from pathlib import Path

from benchmarks.serving import hostile
from benchmarks.serving.files import FAMILIES
from tests.server.processes import SERVE, serving

UPLOADS = 400


def test_each_is_refused_for_a_reason(tmp_path: Path, set_environment: Callable[[str, object], None]) -> None:
    for name, value in hostile.SETTINGS.items():
        set_environment(name, value)
    with serving(tmp_path, (*SERVE, "--workers", "0")) as (server, port):
        (record,) = hostile.siege(port, server.pid, uploads=UPLOADS, large=False)  # asserts for each answer
        assert server.poll() is None
    assert record["uploads"] >= UPLOADS
    assert len(record["families"]) > len(FAMILIES)  # nearly all of them, forms, parameters and lengths
    assert set(record["statuses"]) <= {"0", "400", "408", "413", "422"}  # 0: clients that leave
    assert record["peak_megabytes"] < hostile.MEMORY_BYTES / 1e6


def test_the_largest_file_is_not_held_after_its_refusal(tmp_path: Path) -> None:
    """Neither by the error that it raised, nor by the heap; three at once are in memory one after the other."""
    with serving(tmp_path, (*SERVE, "--workers", "0")) as (server, port):
        before = hostile.Memory(server.pid).now()
        hostile.refused(port, [hostile.LARGE["dense, NaN at the end"]()] * 3)
        memory = hostile.Memory(server.pid)
        assert memory.peak() < hostile.MEMORY_BYTES
        assert memory.now() < before + 100e6
