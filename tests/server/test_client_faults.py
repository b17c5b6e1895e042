"""The client while its service is killed, busy, forgetful or wrong, and the connection bad."""

import hashlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lospmm.artifact import kept
from lospmm.client import connection
from lospmm.client.client import Client
from lospmm.errors import ServiceFault, ToolchainFault
from lospmm.matrix.csr import from_dense
from tests.fixtures.waiting import wait_until
from tests.server.client_tools import SLOW, altered, client_of, free_port, in_background, serve_at
from tests.server.conftest import SlowToolkit, weights, working
from tests.server.processes import serving
from tests.server.served import served


@pytest.fixture
def client() -> Iterator[Client]:
    with served() as port, client_of(port) as client:
        yield client


def test_a_job_that_fails_there_fails_here_alike(slow_toolkit: SlowToolkit) -> None:
    ptxas = slow_toolkit.root / "bin" / "ptxas"
    ptxas.write_text(ptxas.read_text().replace(f'echo "$*" >> {slow_toolkit.log}', "exit 3; echo"))
    with served() as port, client_of(port) as client:
        with pytest.raises(ToolchainFault, match=rf"127\.0\.0\.1:{port}: ptxas .*log: "):
            client.tune(weights(), 64, **SLOW)
        (layer,) = client.tune_model({"fc": weights()}, 64, **SLOW)
        assert isinstance(layer.error, ToolchainFault)
        assert sorted(job.kind for job in client.jobs("failed")) == ["kernel", "model"]


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again_in_mid_wait(tmp_path: Path, slow_toolkit: SlowToolkit) -> None:
    port, said, told = free_port(), [], []
    with in_background() as submit, client_of(port, waits=said.append) as client:
        with serving(tmp_path, (*serve_at(port), "--workers", "0")) as (server, _), working():
            done = submit(client.tune, weights(), 64, **SLOW, progress=lambda *step: told.append(step))
            wait_until(lambda: slow_toolkit.compilations and any(stage == "compile" for stage, *_ in told))
            server.kill()
            server.wait()
        wait_until(lambda: said)
        assert not done.done()
        slow_toolkit.gate.touch()
        with served(port):
            kernel = done.result(timeout=300)
            (job,) = client.jobs()
    assert said[0].startswith(f"waiting for http://127.0.0.1:{port}: ")
    assert len(told) == len(set(told)), "nothing is told twice"
    assert job.state == "succeeded" and kernel.artifact == kept.find(job.id, kept.open_store())


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_new_server_does_not_know_is_posted_again(
    tmp_path: Path,
    slow_toolkit: SlowToolkit,
    set_environment: Callable[[str, object], None],
    ending: signal.Signals,
) -> None:
    port = free_port()
    with in_background() as submit, client_of(port) as client:
        with serving(tmp_path, (*serve_at(port), "--workers", "0")) as (server, _), working():
            one = submit(client.tune, weights(), 64, **SLOW)
            several = submit(client.tune_model, {"a": weights(1), "b": weights(2)}, 64, **SLOW)
            wait_until(lambda: slow_toolkit.compilations and len(list(client.jobs())) == 2)
            server.send_signal(ending)
            server.wait(120)
        slow_toolkit.gate.touch()
        set_environment("LOSPMM_CACHE_DIR", tmp_path / "another")
        with served(port):
            assert one.result(timeout=300).manifest["fingerprint"] == from_dense(weights()).fingerprint
            assert [layer.kernel.manifest["n"] for layer in several.result(timeout=300)] == [64, 64]


@pytest.mark.slow
def test_a_busy_service_is_asked_again(
    slow_toolkit: SlowToolkit, set_environment: Callable[[str, object], None]
) -> None:
    set_environment("LOSPMM_MAX_JOBS", 1)
    said: list[str] = []
    with served() as port, in_background() as submit, client_of(port, waits=said.append) as client:
        first = submit(client.tune, weights(1), 64, **SLOW)
        wait_until(lambda: slow_toolkit.compilations)
        second = submit(client.tune, weights(2), 64, **SLOW)
        wait_until(lambda: said)
        assert "1 jobs are under way" in said[0]
        with client_of(port, patience_seconds=0.2) as hasty, pytest.raises(ServiceFault, match=r"tried for 0\.2 s"):
            hasty.tune(weights(3), 64, **SLOW)
        slow_toolkit.gate.touch()
        assert first.result(timeout=300).manifest["nnz"] == from_dense(weights(1)).nnz
        assert second.result(timeout=300).manifest["nnz"] == from_dense(weights(2)).nnz


@pytest.mark.slow
@pytest.mark.usefixtures("slow_toolkit")
def test_the_time_may_be_up_and_a_job_cancelled() -> None:
    with served() as port, in_background() as submit, client_of(port) as client:
        with pytest.raises(ServiceFault, match=r"(queued|running) when the time was up; the job goes on"):
            client.tune(weights(), 64, timeout_seconds=2.0, **SLOW)
        (job,) = client.jobs()
        assert not client.job(job.id).is_ended
        waiting = submit(client.tune, weights(), 64, **SLOW)
        model = submit(client.tune_model, {"a": weights(7), "b": weights(8)}, 64, name="net", **SLOW)
        wait_until(lambda: len(list(client.jobs())) == 2)
        newest = next(client.jobs())
        assert (newest.kind, newest.name) == ("model", "net")
        for job_id in (newest.id, job.id):
            client.cancel(job_id)
        with pytest.raises(ServiceFault, match="cancelled"):
            waiting.result(timeout=300)
        assert all(isinstance(layer.error, ServiceFault) for layer in model.result(timeout=300))
        assert {found.state for found in client.jobs()} == {"cancelled"}


def test_files_that_were_damaged_on_their_way_are_asked_for_again(client: Client, monkeypatch: Any) -> None:
    monkeypatch.setattr(connection, "BACKOFF_SECONDS", (0.01, 0.02))
    damaged: list[str] = []

    def once(request: httpx2.Request, answer: httpx2.Response) -> httpx2.Response | None:
        path = request.url.path
        if path in damaged or "/v1/kernels/" not in path:
            return answer
        damaged.append(path)
        if len(damaged) % 2:
            return None
        return httpx2.Response(200, headers=answer.headers, content=b"X" + answer.content[1:])

    altered(client, once)
    kernel = client.tune(weights(), 64, device="h200")
    assert len(damaged) == 6
    assert kernel.artifact == kept.find(next(client.jobs()).id, kept.open_store())


def test_a_service_that_sends_something_else_is_not_believed(client: Client) -> None:
    other = client.tune(weights(9), 64, device="h200").artifact
    digest = next(client.jobs()).id

    def swapped(request: httpx2.Request, answer: httpx2.Response) -> httpx2.Response:
        if request.url.path.endswith("/cubin"):
            return httpx2.Response(200, content=b"\x7fELF of another kernel")
        return answer

    def another(request: httpx2.Request, answer: httpx2.Response) -> httpx2.Response:
        if request.method == "POST":
            return httpx2.Response(201, json={"digest": digest})
        return answer

    for change, says in ((swapped, "its sha256 differs"), (another, "is of another matrix than was posted")):
        with client_of(httpx2.URL(client._connection.url).port) as fooled:
            altered(fooled, change)
            with pytest.raises(ServiceFault, match=says):
                fooled.tune(weights(), 64, device="h200")
    assert hashlib.sha256(other.cubin).hexdigest() == other.manifest["cubin_sha256"]


def test_a_kernel_that_was_lost_there_is_tuned_again(client: Client) -> None:
    kernel = client.tune(weights(), 64, device="h200")
    job = next(client.jobs())
    store = kept.open_store()
    for path in sorted(store.directory(kept.KERNELS, job.id).iterdir()):
        path.unlink()
    again = client.tune(weights(), 64, device="h200")
    assert again.cubin == kernel.cubin
