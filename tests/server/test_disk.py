"""Disks that are full, read-only, or not those that the service began with: jobs wait, and none fails."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from lospmm.errors import DiskFault, ToolchainFault
from lospmm.settings import settings
from lospmm.toolchain.faults import compiler_fault
from lospmm.toolchain.process import Finished
from lospmm_server import worker
from lospmm_server.database import FILE
from lospmm_server.disk import HEADROOM_BYTES, Disk
from tests.fixtures.waiting import wait_until
from tests.server.conftest import SlowToolkit, client_of, new_service, npy_file, working
from tests.server.disks import filled, mounted

POST = "/v1/kernels?n=16&device=h200&wait=0"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "BACKOFF_SECONDS", (0.02, 0.1))


@pytest.fixture
def small_disk(tmp_path: Path, set_environment: Callable[[str, object], None]) -> Iterator[Path]:
    """A disk of 96 MiB with the cache, where this user may mount one."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(mounted(tmp_path / "disk", megabytes=96))
        except PermissionError as error:
            pytest.skip(str(error))
        set_environment("LOSPMM_CACHE_DIR", folder / "cache")
        yield folder


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    subprocess.run(("mount", "-o", "remount,ro", folder), check=True)
    try:
        yield
    finally:
        subprocess.run(("mount", "-o", "remount,rw", folder), check=True)


@contextmanager
def moved_away(folder: Path) -> Iterator[None]:
    """The cache and the database in it, with others in their place as a disk that is not mounted leaves them."""
    cache, elsewhere = folder / "cache", folder / "elsewhere"
    cache.rename(elsewhere)
    cache.mkdir()
    try:
        yield
    finally:
        for made in cache.glob("*"):
            assert made.name != FILE, "a database that nobody asked for"
        subprocess.run(("rm", "-r", cache), check=True)
        elsewhere.rename(cache)


@pytest.mark.parametrize("lost", [filled, read_only, moved_away])
def test_jobs_wait_for_the_disk(
    small_disk: Path, slow_toolkit: SlowToolkit, lost: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One runs when it is lost, two are queued; requests are refused, and then all is done."""
    if lost is read_only:  # nobody has a file open there while it turns
        monkeypatch.setenv("LOSPMM_DATABASE_URL", f"sqlite:///{small_disk.parent / 'jobs.db'}")
        settings.cache_clear()
    with client_of(new_service()) as client, working():
        jobs = [client.post(POST, content=npy_file(seed)).headers["location"] for seed in range(3)]
        assert client.get("/readyz").status_code == 200
        wait_until(lambda: slow_toolkit.compilations)
        with lost(small_disk):  # type: ignore[attr-defined]
            slow_toolkit.gate.touch()
            refused = client.post(POST, content=npy_file(3))
            assert (refused.status_code, refused.json()["type"]) == (503, "/problems/unavailable")
            assert int(refused.headers["retry-after"]) > 0
            ready = client.get("/readyz")
            assert (ready.status_code, int(ready.headers["retry-after"]) > 0) == (503, True)
            assert str(small_disk) in ready.json()["detail"]
            time.sleep(1.0)  # in which all would have failed
        ended = [client.get(f"{job}?wait=60").json() for job in jobs]
        assert [(job["state"], job["error"]) for job in ended] == [("succeeded", None)] * 3
        assert client.get("/readyz").status_code == 200


def test_no_headroom_is_said_before_the_disk_is_full(small_disk: Path) -> None:
    disk = Disk.under(small_disk / "cache")
    assert disk.lacks() == []
    (small_disk / "more").write_bytes(bytes((96 << 20) - HEADROOM_BYTES + 1))
    assert disk.lacks() == [f"the cache: {small_disk}/cache has 63 MiB free, less than 64 MiB"]


def test_a_database_that_was_removed_or_replaced(client: TestClient) -> None:
    """SQLite would take jobs into a file that has no name any more, and nobody would find them again."""
    file = settings().cache_dir / FILE
    away = file.rename(file.with_name("away"))
    for replace in (lambda: None, file.touch):
        replace()
        for answer in (client.post(POST, content=npy_file()), client.get("/v1/jobs"), client.get("/readyz")):
            assert (answer.status_code, answer.json()["type"]) == (503, "/problems/unavailable")
            assert f"{FILE} " in answer.json()["detail"]
    away.rename(file)
    assert client.post(f"{POST[:-1]}60", content=npy_file()).status_code == 201


def test_a_kernel_on_a_lost_disk_is_not_tuned_again(client: TestClient) -> None:
    digest = client.post(f"{POST[:-1]}60", content=npy_file()).json()["digest"]
    cache = settings().cache_dir
    client.app.state.service.shelf = type(client.app.state.service.shelf)(client.app.state.service.store)
    away = cache.rename(cache.with_name("away"))
    try:
        assert client.get(f"/v1/kernels/{digest}").status_code == 503
    finally:
        away.rename(cache)
    assert client.get(f"/v1/kernels/{digest}").status_code == 200
    assert client.get(f"/v1/jobs/{digest}").json()["attempts"] == 1


@pytest.mark.parametrize(
    ("output", "kind"),
    [("ptxas fatal : No space left on device", DiskFault), ("ptxas fatal : syntax error", ToolchainFault)],
)
def test_a_compiler_without_room_for_its_files(output: str, kind: type[ToolchainFault]) -> None:
    assert type(compiler_fault("ptxas", Finished(("ptxas",), "", output, 1.0, "exit status 255"), "")) is kind
