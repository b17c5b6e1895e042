"""The client beside services that answer late, by the drop, or with what makes no sense."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from lospmm.client import connection
from lospmm.client.answers import Count, Job, LayerJob
from lospmm.client.client import Client
from lospmm.client.progress import layer_stages
from lospmm.errors import BadRequest, ServiceFault
from tests.server.client_tools import client_of, threaded
from tests.server.conftest import weights


class Scripted(BaseHTTPRequestHandler):
    """Answers what ``told`` says to each request, piece by piece, a while apart."""

    told: ClassVar[Callable[[str], tuple[int, dict[str, str], Iterable[bytes]]]]

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        status, headers, pieces = type(self).told(self.path)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):  # nobody listens any more
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering(told: Callable[[str], tuple[int, dict[str, str], Iterable[bytes]]]) -> Iterator[int]:
    handler = type("Told", (Scripted,), {"told": staticmethod(told)})
    with threaded(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as port:
        yield port


def dripping(piece: bytes) -> Iterator[bytes]:
    for _ in range(200):
        yield piece
        time.sleep(0.1)


JSON = {"content-type": "application/json"}


def a_job(**changed: object) -> tuple[int, dict[str, str], list[bytes]]:
    job = {"id": "ab" * 32, "kind": "kernel", "name": None, "state": "queued", "attempts": 0, "created": None,
           "started": None, "ended": None, "stage": None, "error": None}  # fmt: skip
    return 202, JSON, [json.dumps(job | changed).encode()]


@pytest.mark.parametrize(
    "posted", [(429, {"retry-after": "0"}, []), (429, {"retry-after": "60"}, []), (202, JSON, dripping(b" "))]
)
def test_no_answer_is_waited_for_beyond_the_time(posted: Any) -> None:
    asked: list[str] = []

    def told(path: str) -> Any:
        asked.append(path)
        return posted

    with answering(told) as port, client_of(port) as client:
        begun = time.monotonic()
        with pytest.raises(ServiceFault, match=r"tried for 0\.3"):
            client.tune(weights(), 64, timeout_seconds=0.3)
        assert 0.25 < time.monotonic() - begun < 5
    assert len(asked) < 10


def test_a_job_without_an_end_is_not_waited_for_beyond_the_time() -> None:
    late = pytest.raises(ServiceFault, match="queued when the time was up")
    with answering(lambda _: a_job()) as port, client_of(port) as client, late:
        client.tune(weights(), 64, timeout_seconds=0.3)


@pytest.mark.parametrize("seconds", [0, 1])
def test_nobody_asks_before_the_time_that_a_service_says(seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=time.monotonic, sleep=slept.append))
    answers = [(429, {"retry-after": str(seconds)}, [])] * 3 + [(200, JSON, [b'{"jobs": [], "next": null}'])]
    with answering(lambda _: answers.pop(0)) as port, client_of(port) as client:
        assert list(client.jobs()) == []
    assert len(slept) == 3
    assert all(seconds <= pause <= 1.5 for pause in slept)
    assert slept[0] < slept[2] or seconds, "it waits longer each time where the service says nothing"


@pytest.mark.parametrize("named", ["\u0001\n", "../../x", ""])
def test_a_job_without_a_name_is_the_fault_of_the_service(named: str) -> None:
    refused = pytest.raises(ServiceFault, match=r"not as a service of lospmm does \(id: ")
    with answering(lambda _: a_job(id=named)) as port, client_of(port) as client, refused:
        client.tune(weights(), 64)


def test_the_first_field_that_is_no_job_is_named() -> None:
    refused = pytest.raises(ServiceFault, match="attempts")
    with answering(lambda _: a_job(stage=3, attempts="many")) as port, client_of(port) as client, refused:
        client.tune(weights(), 64)


def test_a_server_that_is_stopped_in_the_middle_of_a_request_is_asked_again() -> None:
    plain = {"content-type": "text/plain"}
    answers = [(500, plain, [b"Internal Server Error"]), (200, JSON, [b'{"jobs": [], "next": null}'])]
    with answering(lambda _: answers.pop(0)) as port, client_of(port) as client:
        assert list(client.jobs()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("ALL_PROXY", "socks5://127.0.0.1:1"), ("HTTP_PROXY", "ftp://x"), ("SSL_CERT_FILE", "/nonexistent")],
)
def test_an_environment_that_does_not_work_is_said(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(BadRequest, match=f"what the environment says of connections cannot be used: .*{name}"):
        Client("http://127.0.0.1:1")


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_host_that_cannot_be_is_no_address(host: str) -> None:
    with pytest.raises(BadRequest, match="the address of the service"):
        Client(f"http://{host}")


def test_each_step_of_a_layer_is_told_once() -> None:
    def job(*layers: tuple[str, dict[str, Count]]) -> Job:
        rows = [
            LayerJob(name, state, None, None, progress) for name, (state, progress) in zip("ab", layers, strict=True)
        ]
        return Job("", "model", None, "running", 1, None, None, None, None, None, layers=tuple(rows))

    told: list[tuple[str, str, int, int]] = []
    hear = layer_stages(lambda *step: told.append(step), ["fc@8", "fc@64"])
    begun, whole = {"compile": Count(1, 3)}, {"compile": Count(3, 3), "verify": Count(1, 1)}
    for one in (("queued", {}), ("running", begun), ("running", begun), ("succeeded", whole), ("succeeded", whole)):
        hear(job(one, ("queued", {})))
    hear(job(("succeeded", whole), ("cancelled", {})))
    assert told == [
        ("fc@8", "running", 1, 1), ("fc@8", "compile", 1, 3), ("fc@8", "compile", 1, 1), ("fc@8", "verify", 1, 1),
        ("fc@8", "succeeded", 1, 1), ("fc@64", "cancelled", 1, 1),
    ]  # fmt: skip
