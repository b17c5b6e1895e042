"""Nothing that was accepted is lost: processes are killed, the database goes away, files are damaged."""

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import sqlalchemy as sa
from starlette.testclient import TestClient

from lospmm.artifact import kept
from lospmm.settings import settings
from lospmm.store import Store
from lospmm_server import database as database_module
from lospmm_server import leases, queries, queue, shelf, worker
from lospmm_server.database import Database
from lospmm_server.keys import NOBODY
from lospmm_server.leases import LATE_SECONDS, LEASE_SECONDS, LOOK_SECONDS, Lookout
from lospmm_server.queue import KernelOrder
from lospmm_server.queued_request import MATRICES
from lospmm_server.service import Service
from lospmm_server.tables import kernels
from tests.fixtures.waiting import wait_until
from tests.server.conftest import SlowToolkit, client_of, new_service, npy_file, working
from tests.server.postgresql import Cluster
from tests.server.processes import WORKER, client_at, compilers, is_alive, serving, started, workers_of
from tests.server.served import served

POST = "/v1/kernels?n=16&device=h200"


@pytest.mark.slow
@pytest.mark.usefixtures("either_database")
def test_a_killed_worker_is_replaced_and_its_job_done(tmp_path: Path, slow_toolkit: SlowToolkit) -> None:
    with serving(tmp_path) as (server, port), client_at(port) as client:
        job = client.post(f"{POST}&wait=0", content=npy_file()).headers["location"]
        wait_until(lambda: slow_toolkit.compilations)
        (worker,) = workers_of(server.pid)
        worker.kill()
        wait_until(lambda: slow_toolkit.compilations == 2)  # the second attempt
        assert not is_alive(worker)
        slow_toolkit.gate.touch()
        ended = client.get(f"{job}?wait=60").json()
        assert (ended["state"], ended["attempts"]) == ("succeeded", 2)
        assert client.get(ended["links"]["kernel"]).status_code == 200


@pytest.mark.slow
def test_a_worker_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    """As where a machine is short of memory or a server of files, which may be what ended the last one."""
    with serving(tmp_path) as (server, port), client_at(port) as client:
        wait_until(lambda: workers_of(server.pid))
        (worker,) = workers_of(server.pid)
        process = psutil.Process(server.pid)
        limits = process.rlimit(psutil.RLIMIT_NOFILE)
        process.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
        worker.kill()
        wait_until(lambda: not is_alive(worker))
        time.sleep(1.5)  # the first is tried after half a second
        process.rlimit(psutil.RLIMIT_NOFILE, limits)
        answer = client.post(f"{POST}&wait=60", content=npy_file())
        assert answer.status_code == 201, answer.text


@pytest.mark.slow
@pytest.mark.usefixtures("either_database")
def test_a_killed_server_loses_no_job_and_leaves_no_worker(tmp_path: Path, slow_toolkit: SlowToolkit) -> None:
    with serving(tmp_path) as (server, port), client_at(port) as client:
        accepted = [client.post(f"{POST}&wait=0", content=npy_file(seed)).headers["location"] for seed in (1, 2)]
        wait_until(lambda: slow_toolkit.compilations)
        children = psutil.Process(server.pid).children(recursive=True)
        assert compilers(slow_toolkit.log)
        server.send_signal(signal.SIGKILL)
        server.wait()
        wait_until(lambda: not any(is_alive(child) for child in children))
        wait_until(lambda: not compilers(slow_toolkit.log))
    slow_toolkit.gate.touch()
    with served() as port, client_at(port) as client:
        for job in accepted:
            ended = client.get(f"{job}?wait=60").json()
            assert (ended["state"], ended["attempts"]) == ("succeeded", 1)


@pytest.mark.slow
def test_a_killed_worker_elsewhere_is_found_out_by_another(
    idle_client: TestClient, slow_toolkit: SlowToolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody saw it die: its beat stands still for a lease."""
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(leases, "LOOK_SECONDS", 0.1)
    job = idle_client.post(f"{POST}&wait=0", content=npy_file()).headers["location"]
    with started(*WORKER) as process:
        wait_until(lambda: slow_toolkit.compilations)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert idle_client.get(job).json()["state"] == "running"
    slow_toolkit.gate.touch()
    with working():
        ended = idle_client.get(f"{job}?wait=60").json()
    assert (ended["state"], ended["attempts"]) == ("succeeded", 2)


#: A server whose worker ends as soon as it has a job, as one that runs out of memory does.
POISONOUS = """
import os, sys
from lospmm.tuning import jobs
from lospmm.cli.main import main

def die(*_, **__):
    os.kill(os.getpid(), 9)

jobs.tune = die
sys.argv = ["lospmm", "worker"]
main()
"""


@pytest.mark.slow
def test_a_job_that_kills_its_workers_gives_up_after_three(idle_client: TestClient, service: Service) -> None:
    job = idle_client.post(f"{POST}&wait=0", content=npy_file()).headers["location"]
    for attempt in (1, 2, 3):
        with started("-c", POISONOUS) as poisoned:
            assert poisoned.wait(120) == -signal.SIGKILL
        assert idle_client.get(job).json()["attempts"] == attempt
        for _, owner in queue.running(service.database):  # what the server does that started it
            queue.release_all_of(service.database, owner)
    ended = idle_client.get(f"{job}?wait=10").json()
    assert (ended["state"], ended["error"]["type"]) == ("failed", "/problems/gave-up")
    refused = idle_client.post(f"{POST}&wait=0", content=npy_file())
    assert refused.status_code == 202  # posting it again starts anew


def test_cancel_ends_the_compilers(client: TestClient, slow_toolkit: SlowToolkit) -> None:
    job = client.post(f"{POST}&wait=0", content=npy_file()).headers["location"]
    wait_until(lambda: compilers(slow_toolkit.log))
    told = client.delete(job)
    assert (told.status_code, told.json()["state"], told.json()["cancelling"]) == (202, "running", True)
    wait_until(lambda: not compilers(slow_toolkit.log))
    ended = client.get(f"{job}?wait=20").json()
    assert (ended["state"], ended["error"]["type"]) == ("cancelled", "/problems/cancelled")
    assert client.delete(job).json()["state"] == "cancelled"
    slow_toolkit.gate.touch()
    assert client.post(f"{POST}&wait=60", content=npy_file()).status_code == 201


def test_a_job_that_takes_too_long(
    client: TestClient, slow_toolkit: SlowToolkit, set_environment: Callable[[str, object], None]
) -> None:
    set_environment("LOSPMM_JOB_SECONDS", 0.5)
    refused = client.post(f"{POST}&wait=20", content=npy_file())
    assert (refused.status_code, refused.json()["type"]) == (500, "/problems/out-of-time")
    assert "0.5 s of LOSPMM_JOB_SECONDS" in refused.json()["detail"]
    assert slow_toolkit.compilations == 1


class TestClocks:
    """A lease is what one looker has seen by its own monotonic clock."""

    JOB = ("digest", "owner")

    def looks(self, lookout: Lookout, beats: dict[float, int]) -> list[float]:
        """The times at which the job counts as abandoned, of a look at each."""
        return [now for now, beat in beats.items() if lookout.expired({self.JOB: beat}, now)]

    def test_a_beat_that_stands_still(self) -> None:
        times = np.arange(0, LEASE_SECONDS + 3, LOOK_SECONDS)
        expired = self.looks(Lookout(), dict.fromkeys(times, 7))
        assert expired == [now for now in times if now >= LEASE_SECONDS]

    def test_one_that_moves(self) -> None:
        assert self.looks(Lookout(), {now: int(now) // 10 for now in np.arange(0, 200, LOOK_SECONDS)}) == []

    def test_a_looker_that_slept_begins_again(self) -> None:
        lookout = Lookout()
        assert self.looks(lookout, {0.0: 7, LATE_SECONDS + 0.1: 7, 2 * LEASE_SECONDS: 7}) == []
        later = 2 * LEASE_SECONDS + np.arange(LOOK_SECONDS, LEASE_SECONDS, LOOK_SECONDS)
        assert self.looks(lookout, dict.fromkeys(later, 7)) == []

    def test_another_owner_begins_anew(self) -> None:
        lookout = Lookout()
        for now in np.arange(0, 2 * LEASE_SECONDS, LOOK_SECONDS):
            assert not lookout.expired({("digest", f"owner{now // 10}"): 1}, now)

    def test_the_time_of_day_does_not_matter(
        self, client: TestClient, slow_toolkit: SlowToolkit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It jumps a day back and forth while a job runs, with a lease that is short."""
        monkeypatch.setattr(leases, "LEASE_SECONDS", 0.6)
        monkeypatch.setattr(leases, "LOOK_SECONDS", 0.05)
        monkeypatch.setattr(worker, "BEAT_SECONDS", 0.1)
        job = client.post(f"{POST}&wait=0", content=npy_file()).headers["location"]
        wait_until(lambda: slow_toolkit.compilations)
        real = queue._now
        with working():  # another one, which looks for the dead
            for days in (1, -1, 365):
                monkeypatch.setattr(queue, "_now", lambda days=days: real() + np.timedelta64(days, "D").item())
                monkeypatch.setattr(time, "time", lambda days=days: time.time_ns() / 1e9 + 86_400 * days)
                time.sleep(0.35)
            slow_toolkit.gate.touch()
            ended = client.get(f"{job}?wait=60").json()
        assert (ended["state"], ended["attempts"]) == ("succeeded", 1)


def test_a_damaged_kernel_is_tuned_again_by_itself(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "CHECK_SECONDS", -1.0)  # every request looks at the disk
    kernel = client.post(f"{POST}&wait=60", content=npy_file()).json()
    directory = Store(settings().cache_dir).directory(kept.KERNELS, kernel["digest"])
    (directory / "kernel.cubin").write_bytes(b"damaged")
    gone = client.get(kernel["links"]["cubin"])
    assert (gone.status_code, "it is tuned again" in gone.json()["detail"]) == (404, True)
    assert client.get(f"/v1/jobs/{kernel['digest']}?wait=60").json()["state"] == "succeeded"
    assert client.get(kernel["links"]["cubin"]).content.startswith(b"\x7fELF")


def test_a_matrix_that_was_removed_or_damaged(idle_client: TestClient) -> None:
    """Before its turn came: the job says so, and posting it again helps."""
    for damage in (lambda file: file.write_bytes(b"damaged"), lambda file: file.unlink()):
        job = idle_client.post(f"{POST}&wait=0", content=npy_file()).headers["location"]
        damage(next((settings().cache_dir / MATRICES).glob("*/*/matrix.npz")))
        with working():
            ended = idle_client.get(f"{job}?wait=60").json()
        assert (ended["state"], ended["error"]["type"]) == ("failed", "/problems/unavailable")
        assert ended["error"]["detail"].endswith("no longer in the store, or damaged; post it again")
    assert idle_client.post(f"{POST}&wait=0", content=npy_file()).status_code == 202
    with working():
        assert idle_client.get(f"{job}?wait=60").json()["state"] == "succeeded"


def test_a_worker_of_another_version_does_not_answer_for_this_one(client: TestClient) -> None:
    service = client.app.state.service
    job = client.post(f"{POST}&wait=60", content=npy_file()).json()["digest"]
    with service.database.read() as connection:
        request = connection.execute(sa.select(kernels.c.request)).scalar_one()
    queue.submit(service.database, KernelOrder("0" * 64, request, ""), NOBODY)
    ended = client.get(f"/v1/jobs/{'0' * 64}?wait=60").json()
    assert (ended["state"], job != ended["id"]) == ("failed", True)
    assert "another version of lospmm or of the CUDA toolkit" in ended["error"]["detail"]
    old = {**request, "options": {"unknown": 1}}
    queue.submit(service.database, KernelOrder("1" * 64, old, ""), NOBODY)
    ended = client.get(f"/v1/jobs/{'1' * 64}?wait=60").json()
    assert ended["error"]["detail"].startswith("the request was accepted by another version of lospmm")


def test_a_database_that_goes_and_comes_back(
    cluster: Cluster, slow_toolkit: SlowToolkit, set_environment: Callable[[str, object], None]
) -> None:
    """While nobody works, while a job runs, and at its end."""
    set_environment("LOSPMM_DATABASE_URL", cluster.create_schema(f"gone{os.getpid()}"))
    with working(), client_of(new_service()) as client:
        kept = client.app.state.service
        job = client.post(f"{POST}&wait=0", content=npy_file()).headers["location"]
        wait_until(lambda: slow_toolkit.compilations)
        cluster.stop()
        try:
            for answer in (client.get(job), client.post(f"{POST}&wait=0", content=npy_file(1)), client.get("/readyz")):
                assert (answer.status_code, answer.json()["type"]) == (503, "/problems/unavailable")
                assert "cannot be used now" in answer.json()["detail"]
            assert client.get("/healthz").status_code == 200
            assert 'lospmm_queue_jobs{state="running"} NaN' in client.get("/metrics").text
            slow_toolkit.gate.touch()  # the job ends while its database is away
            wait_until(lambda: kept.shelf.find(job.rpartition("/")[2]))
            assert client.get(f"/v1/kernels/{job.rpartition('/')[2]}").status_code == 200  # that needs no database
        finally:
            cluster.start()
        wait_until(lambda: client.get(job).status_code == 200)
        ended = client.get(f"{job}?wait=60").json()
        assert (ended["state"], ended["attempts"]) == ("succeeded", 1)
        assert client.post(f"{POST}&wait=60", content=npy_file(1)).status_code == 201
        assert client.get("/readyz").status_code == 200


@pytest.mark.usefixtures("client")
def test_a_file_that_somebody_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite: as long as another program has it locked, the answer is 503, and then all goes on."""
    monkeypatch.setattr(database_module, "BUSY_SECONDS", 0.2)
    with client_of(new_service()) as impatient:
        holder = sqlite3.connect(settings().cache_dir / database_module.FILE, isolation_level=None)
        holder.execute("BEGIN EXCLUSIVE")
        refused = impatient.post(f"{POST}&wait=0", content=npy_file())
        assert (refused.status_code, refused.json()["type"]) == (503, "/problems/unavailable")
        assert "database is locked" in refused.json()["detail"]
        assert int(refused.headers["retry-after"]) > 0
        holder.execute("ROLLBACK")
        holder.close()
        assert impatient.post(f"{POST}&wait=60", content=npy_file()).status_code == 201


def test_a_full_disk_is_a_reason(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("lospmm.store._write", full)
        refused = client.post(f"{POST}&wait=60", content=npy_file())
    assert (refused.status_code, refused.json()["type"]) == (503, "/problems/unavailable")
    assert int(refused.headers["retry-after"]) > 0
    assert f"the store in {settings().cache_dir} cannot be used: No space left" in refused.json()["detail"]
    assert client.get("/v1/jobs").json()["jobs"] == []  # nothing was accepted
    assert client.post(f"{POST}&wait=60", content=npy_file()).status_code == 201


def test_a_job_that_always_fills_the_disk_is_given_up(client: TestClient, slow_toolkit: SlowToolkit) -> None:
    """Whenever it has failed, there is room again: its own files were too many."""
    job = client.post(f"{POST}&wait=0", content=npy_file()).headers["location"]
    wait_until(lambda: slow_toolkit.compilations)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("lospmm.store._write", _fail_for_lack_of_space)
        slow_toolkit.gate.touch()
        ended = client.get(f"{job}?wait=60").json()
    assert (ended["state"], ended["attempts"], ended["error"]["type"]) == ("failed", 3, "/problems/unavailable")
    assert str(settings().cache_dir) in ended["error"]["detail"]


def _fail_for_lack_of_space(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_who_is_idle_writes_nothing(either_database: Database) -> None:
    """Workers that wait keep nobody from writing, and leave the file as it is."""
    before = queries.last_event(either_database)
    stop = threading.Event()
    with working():
        stop.wait(0.2)
        with either_database.write():  # as long as this is open, nobody else could write
            stop.wait(0.2)
    assert queries.last_event(either_database) == before
