"""Jobs: done once, waited for, refused when there are too many, and ended with the service."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from starlette.testclient import TestClient

from lospmm.errors import LospmmError, NothingFits, ToolchainFault, VerificationFailed
from lospmm.tuning import jobs
from lospmm.tuning.request import Request
from lospmm_server import queue, retention
from lospmm_server.service import Service
from tests.fixtures.full_disk import take_no_kernels
from tests.fixtures.waiting import wait_until
from tests.server.conftest import SlowToolkit, client_of, new_service, npy_file, working

POST = "/v1/kernels?n=128&device=h200"


def post(client: TestClient, seed: int = 0, wait: float = 0) -> httpx2.Response:
    return client.post(f"{POST}&wait={wait}", files={"matrix": ("W.npy", npy_file(seed))})


def test_a_job_is_accepted_polled_and_found_done(client: TestClient, slow_toolkit: SlowToolkit) -> None:
    accepted = post(client)
    assert accepted.status_code == 202
    job = accepted.headers["location"]
    assert job == accepted.json()["links"]["self"]
    assert int(accepted.headers["retry-after"]) > 0
    wait_until(lambda: client.get(job).json()["stage"] == "compile")
    running = client.get(job).json()
    assert (running["state"], running["error"], running["links"]["kernel"]) == ("running", None, None)
    assert [one["name"] for one in client.get("/v1/jobs").json()["jobs"]] == [running["name"]] == ["W"]
    assert running["progress"]["reorder"] == {"done": 1, "total": 1}
    assert running["progress"]["compile"]["done"] == 0
    slow_toolkit.gate.touch()
    done = client.get(f"{job}?wait=60")
    assert (done.json()["state"], "retry-after" in done.headers) == ("succeeded", False)
    assert done.json()["progress"]["compile"] == {"done": 1, "total": 1}
    assert client.get(done.json()["links"]["kernel"]).status_code == 200
    assert client.get(job).json()["state"] == "succeeded"
    again = post(client)
    assert (again.status_code, again.json()["digest"]) == (201, done.json()["id"])


@pytest.mark.usefixtures("slow_toolkit")
def test_a_wait_ends_when_its_time_is_up(client: TestClient) -> None:
    started = time.monotonic()
    accepted = post(client, wait=0.3)
    assert accepted.status_code == 202
    assert client.get(f"{accepted.headers['location']}?wait=0.3").json()["state"] == "running"
    assert 0.6 <= time.monotonic() - started < 10


@pytest.mark.usefixtures("slow_toolkit")
def test_a_binary_that_is_not_ready_is_a_job(client: TestClient) -> None:
    answer = client.post(f"{POST}&wait=0", content=npy_file(), headers={"Accept": "application/octet-stream"})
    assert (answer.status_code, answer.headers["content-type"]) == (202, "application/json")


def test_the_same_posted_twice_at_once_is_tuned_once(client: TestClient, slow_toolkit: SlowToolkit) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(post, client, 0, 60.0) for _ in range(4)]
        wait_until(lambda: slow_toolkit.compilations)
        time.sleep(0.3)  # let the others arrive
        slow_toolkit.gate.touch()
        kernels = [answer.result() for answer in answers]
    assert [kernel.status_code for kernel in kernels] == [201] * 4
    assert len({kernel.text for kernel in kernels}) == 1
    assert slow_toolkit.compilations == 1  # the prologue of one kernel


def test_different_matrices_are_tuned_one_after_the_other(client: TestClient, slow_toolkit: SlowToolkit) -> None:
    first, second = (post(client, seed).headers["location"] for seed in (1, 2))
    wait_until(lambda: client.get(first).json()["stage"] == "compile")
    assert [client.get(job).json()["state"] for job in (first, second)] == ["running", "queued"]
    slow_toolkit.gate.touch()
    assert [client.get(f"{job}?wait=60").json()["state"] for job in (second, first)] == ["succeeded"] * 2


def test_too_many_jobs(
    client: TestClient, slow_toolkit: SlowToolkit, set_environment: Callable[[str, object], None]
) -> None:
    set_environment("LOSPMM_MAX_JOBS", 2)
    accepted = [post(client, seed) for seed in (1, 2)]  # one runs, one may wait
    assert [answer.status_code for answer in accepted] == [202, 202]
    refused = post(client, 3)
    assert (refused.status_code, refused.json()["type"]) == (429, "/problems/busy")
    assert int(refused.headers["retry-after"]) > 0
    assert post(client, 2).status_code == 202  # what is under way may be asked for again
    slow_toolkit.gate.touch()
    for answer in accepted:
        client.get(f"{answer.headers['location']}?wait=60")
    assert post(client, 3, wait=60).status_code == 201


def test_a_full_service_still_gives_what_it_has(
    client: TestClient, slow_toolkit: SlowToolkit, set_environment: Callable[[str, object], None]
) -> None:
    set_environment("LOSPMM_MAX_JOBS", 2)
    slow_toolkit.gate.touch()
    assert post(client, 3, wait=60).status_code == 201
    slow_toolkit.gate.unlink()
    assert [post(client, seed).status_code for seed in (1, 2, 4, 3)] == [202, 202, 429, 201]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (NothingFits("no tile size fits h200"), 422, "nothing-fits"),
        (ToolchainFault("ptxas: out of memory"), 500, "toolchain-fault"),
        (VerificationFailed("row 3 differs"), 500, "verification-failed"),
        (LospmmError("something else"), 500, "internal"),
        (ZeroDivisionError("a secret"), 500, "internal"),
    ],
)
def test_a_job_that_fails(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, kind: str
) -> None:
    go_on = threading.Event()

    def fail(*_: object, **__: object) -> None:
        assert go_on.wait(120)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(jobs, "tune", fail)
        accepted = post(client)
        go_on.set()
        refused = post(client, wait=60)
        assert refused.headers["content-type"] == "application/problem+json"
        assert (refused.status_code, refused.json()["type"]) == (status, f"/problems/{kind}")
        failed = client.get(f"{accepted.headers['location']}?wait=60")
        assert (failed.status_code, failed.json()["state"]) == (200, "failed")
        assert failed.json()["error"] == refused.json()
        assert "secret" not in refused.text
    assert post(client, wait=60).status_code == 201  # a failure is not final
    assert client.get(accepted.headers["location"]).json()["state"] == "succeeded"


def test_the_oldest_failures_are_forgotten(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise NothingFits("no")

    monkeypatch.setattr(jobs, "tune", fail)
    failed = []
    for seed in (1, 2, 3):
        failed.append(post(client, seed).headers["location"])
        assert client.get(f"{failed[-1]}?wait=60").json()["state"] == "failed"
    retention.forget(client.app.state.service.database, keep=2)
    assert [client.get(job).status_code for job in failed] == [404, 200, 200]


def test_reading_does_not_hold_up_others(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def slowly(self: Service, request: Request, key: str) -> queue.KernelOrder:
        reading.set()
        assert go_on.wait(120)
        return order(self, request, key)

    order = Service.order
    monkeypatch.setattr(Service, "order", slowly)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, client, 0, 60.0)
        assert reading.wait(120)
        assert client.get("/healthz").status_code == 200
        go_on.set()
        assert answer.result().status_code == 201


def test_those_who_wait_are_told_when_the_service_ends_and_their_jobs_are_kept(slow_toolkit: SlowToolkit) -> None:
    service = new_service()
    with ThreadPoolExecutor(2) as pool, working(), client_of(service) as client:
        waiting = [pool.submit(post, client, seed, 60.0) for seed in (1, 2)]
        wait_until(lambda: slow_toolkit.compilations)
        wait_until(lambda: len(client.get("/v1/jobs").json()["jobs"]) == 2)
        client.portal.call(service.stop)
        answers = [answer.result(5) for answer in waiting]
        assert [answer.status_code for answer in answers] == [202, 202]
        assert post(client, 3).status_code == 503
        assert client.get("/readyz").status_code == 503
    slow_toolkit.gate.touch()
    with working(), client_of(new_service()) as client:
        for answer in answers:
            job = client.get(f"{answer.headers['location']}?wait=60").json()
            assert (job["state"], job["attempts"]) == ("succeeded", 1)


def test_who_waits_for_a_job_that_is_cancelled_is_told(client: TestClient, slow_toolkit: SlowToolkit) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, client, 0, 60.0)
        wait_until(lambda: slow_toolkit.compilations)
        (job,) = client.get("/v1/jobs").json()["jobs"]
        assert client.delete(job["links"]["self"]).status_code == 202
        refused = waiting.result(20)
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/cancelled")


def test_a_job_for_the_gpu_of_the_workers_waits_for_one_that_has_it(
    client: TestClient, set_environment: Callable[[str, object], None]
) -> None:
    set_environment("LOSPMM_WORKER_GPU", "h200")
    waiting = client.post("/v1/kernels?n=128&wait=0.5", content=npy_file())  # device=auto is theirs
    assert (waiting.status_code, waiting.json()["state"]) == (202, "queued")
    set_environment("LOSPMM_WORKER_GPU", "none")
    refused = client.post("/v1/kernels?n=128", content=npy_file())
    assert (
        refused.status_code,
        "device auto: this service's workers have no GPU; name" in refused.json()["detail"],
    ) == (400, True)
    assert client.post("/v1/kernels?n=128&device=h200&wait=60", content=npy_file()).json()["verified"]["on"] == "cpu"


def test_a_kernel_that_the_disk_does_not_take_is_a_job_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would look for it in vain."""
    take_no_kernels(monkeypatch)
    with working(), client_of(new_service()) as client:
        failed = client.get(f"{post(client).headers['location']}?wait=60").json()
    assert failed["state"] == "failed" and "No space left on device" in failed["error"]["detail"]
