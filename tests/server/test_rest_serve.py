"""``lospmm serve`` as users start it, and its end."""

import ipaddress
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx2
import psutil
import pytest
import scipy.sparse

from lospmm.cli import main as cli
from lospmm.errors import BadRequest, BadSettings
from lospmm.settings import settings
from lospmm_server.main import listen, serve
from lospmm_server.worker_process import work
from tests.fixtures.waiting import wait_until
from tests.server.conftest import SlowToolkit, npy_file, weights
from tests.server.processes import client_at, is_alive, serving, started
from tests.server.served import served

curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture(autouse=True)
def limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """``serve`` sets one for its process, which is that of the tests here."""
    monkeypatch.setenv("LOSPMM_MAX_NONZEROS", "")
    monkeypatch.delenv("LOSPMM_MAX_NONZEROS")


#: A worker whose jobs cannot be interrupted.
STUBBORN = """
import time
from lospmm.tuning import jobs
from lospmm_server.worker_process import work

jobs.tune = lambda *_, **__: time.sleep(60)
work("stubborn", None)
"""


def shell(command: str, directory: Path) -> str:
    return subprocess.run(command, shell=True, cwd=directory, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
@curl
def test_curl_gets_a_cubin(tmp_path: Path) -> None:
    scipy.sparse.save_npz(tmp_path / "W.npz", scipy.sparse.csr_array(weights()))
    with serving(tmp_path) as (_, port):
        command = (
            f"curl -F matrix=@W.npz 'localhost:{port}/v1/kernels?n=4096&device=h200&wait=120' "
            "-H 'Accept: application/octet-stream' -o k.cubin"
        )
        shell(command, tmp_path)
    assert (tmp_path / "k.cubin").read_bytes().startswith(b"\x7fELF")


@curl
def test_curl_is_told_that_a_file_is_too_large(tmp_path: Path, set_environment: Callable[[str, object], None]) -> None:
    set_environment("LOSPMM_MAX_UPLOAD_BYTES", 1000)
    (tmp_path / "W.npy").write_bytes(bytes(20_000_000))
    with served(workers=0) as port:
        for send in ("-F matrix=@W.npy", "--data-binary @W.npy", "-T W.npy -X POST -H 'Transfer-Encoding: chunked'"):
            written = shell(f"curl -s {send} 'localhost:{port}/v1/kernels?n=16' -w '%{{http_code}}'", tmp_path)
            assert '"/problems/too-large"' in written
            assert written.endswith("413")


@pytest.mark.parametrize("path", ["/v1/kernels?n=16", "/v1/kernels?n=0", "/v1/nothing"])
@pytest.mark.parametrize("length", ["Content-Length: 8000000", "Transfer-Encoding: chunked"])
def test_who_sends_a_body_that_nobody_wants_is_told_why(
    set_environment: Callable[[str, object], None], path: str, length: str
) -> None:
    """One that sends all before it reads, on a connection that ends with the answer."""
    set_environment("LOSPMM_MAX_UPLOAD_BYTES", 1000)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{length}\r\n\r\n".encode()
    piece = bytes(1 << 16) if length.startswith("Content") else b"10000\r\n" + bytes(1 << 16) + b"\r\n"
    with (
        served(workers=0) as port,
        socket.create_connection(("127.0.0.1", port), timeout=10) as client,
    ):
        client.sendall(head)
        for _ in range(8_000_000 // (1 << 16)):
            client.sendall(piece)
        answer = client.recv(100)
    assert int(answer.split()[1]) in (404, 413, 422)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_its_end_is_quick_and_leaves_no_compiler(
    tmp_path: Path, slow_toolkit: SlowToolkit, how: signal.Signals
) -> None:
    with serving(tmp_path) as (process, port), client_at(port) as client:
        accepted = client.post("/v1/kernels?n=16&device=h200&wait=0", content=npy_file())
        assert accepted.status_code == 202
        wait_until(lambda: slow_toolkit.compilations)
        children = psutil.Process(process.pid).children(recursive=True)
        assert any("ptxas" in " ".join(child.cmdline()) for child in children)
        with socket.create_connection(("127.0.0.1", port)) as waiting:
            request = f"GET {accepted.headers['location']}?wait=600 HTTP/1.1\r\nHost: localhost\r\n\r\n"
            waiting.sendall(request.encode())
            time.sleep(0.2)  # the request arrives
            started = time.monotonic()
            process.send_signal(how)
            assert process.wait(15) == -how
            assert time.monotonic() - started < 8
            assert b'"state":"running"' in waiting.recv(10_000)
    wait_until(lambda: not any(is_alive(child) for child in children))
    slow_toolkit.gate.touch()
    with served() as port, httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        job = client.get(f"{accepted.headers['location']}?wait=60").json()  # which nobody posted again
        assert (job["state"], job["attempts"]) == ("succeeded", 1)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_job_that_does_not_stop_is_not_waited_for(how: signal.Signals) -> None:
    with served(workers=0) as port:
        url = f"http://127.0.0.1:{port}/v1/kernels?n=16&device=h200&wait=0"
        job = f"http://127.0.0.1:{port}" + httpx2.post(url, content=npy_file()).headers["location"]
        with started("-c", STUBBORN) as worker:
            wait_until(lambda: httpx2.get(job).json()["state"] == "running")
            worker.send_signal(how)
            assert worker.wait(15) == 128 + how
        assert (httpx2.get(job).json()["state"], httpx2.get(job).json()["attempts"]) == ("queued", 0)


def test_a_client_that_leaves_does_not_end_its_job(slow_toolkit: SlowToolkit) -> None:
    with served() as port, httpx2.Client(base_url=f"http://127.0.0.1:{port}") as client:
        post = "/v1/kernels?n=16&device=h200"
        with pytest.raises(httpx2.ReadTimeout):
            client.post(f"{post}&wait=60", content=npy_file(), timeout=0.5)
        wait_until(lambda: slow_toolkit.compilations)
        slow_toolkit.gate.touch()
        assert client.post(f"{post}&wait=60", content=npy_file(), timeout=60).status_code == 201
    assert slow_toolkit.compilations == 1  # the prologue of one kernel, compiled once


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1"])
def test_other_addresses_need_keys(host: str) -> None:
    with pytest.raises(BadRequest, match="that other machines can reach, and there is no API key"):
        serve(host, 0, 0)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 100, "127.0.0.1.5"])
def test_a_host_that_there_is_not(host: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(f"host {host!r}: ")):
        listen(host, 0)


def test_a_port_that_is_taken_or_impossible() -> None:
    with ExitStack() as opened:
        listeners = [opened.enter_context(listener) for listener in listen("localhost", 0)]
        assert all(ipaddress.ip_address(listener.getsockname()[0]).is_loopback for listener in listeners)
        host, port, *_ = listeners[0].getsockname()
        with pytest.raises(BadRequest, match=f"port {port}: Address already in use; choose another with --port"):
            listen(host, port)
    with pytest.raises(BadRequest, match="port 65536"):
        listen("127.0.0.1", 65536)


def test_workers_with_a_gpu_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOSPMM_WORKER_GPU", "h20")
    settings.cache_clear()
    with pytest.raises(BadSettings, match=r"LOSPMM_WORKER_GPU: 'h20' is none of v100, .*, b200, none$"):
        serve("127.0.0.1", 0, 0)


@pytest.mark.parametrize("arguments", [("serve", "--port", "0"), ("worker",)])
def test_a_toolkit_that_is_none(
    tmp_path: Path,
    set_environment: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
) -> None:
    set_environment("LOSPMM_TOOLKIT", tmp_path)
    assert cli.run([*arguments]) == 2
    assert capsys.readouterr() == ("", f"error: LOSPMM_TOOLKIT: no nvcc in {tmp_path}/bin\n")


def test_more_workers_than_a_machine_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", "--port", "0", "--workers", "99999"]) == 2
    says = "error: Invalid value for '--workers': Input should be less than or equal to 256\n"
    assert capsys.readouterr() == ("", says)


def test_the_command_line_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", "--host", "0.0.0.0"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: 0.0.0.0 is an address that other machines can reach")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("name", ["w" * 61, "two\nlines"])
def test_a_worker_with_a_name_that_no_table_holds(name: str) -> None:
    with pytest.raises(BadRequest, match="at most 60 printable characters"):
        work(name, None)
