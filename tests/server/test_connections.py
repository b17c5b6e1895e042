"""Clients that connect and say nothing, or too little, or do not read: they cost nobody else the service."""

import asyncio
import errno
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx2
import psutil
import pytest

from lospmm_server import connections, http_server, main
from lospmm_server.connections import Door, most_connections
from tests.fixtures.waiting import wait_until
from tests.server.conftest import new_service, npy_file
from tests.server.processes import client_at
from tests.server.served import served

MOST = 8
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of a service that may have a few connections."""
    monkeypatch.setattr(http_server, "most_connections", lambda _files: MOST)
    with served(workers=0) as port:
        yield port


def connected(port: int, count: int, stack: ExitStack) -> list[socket.socket]:
    return [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(count)]


def test_idle_connections_make_room(port: int, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack, caplog.at_level(logging.WARNING, connections.__name__):
        idle = connected(port, 100, stack)
        for _ in range(3):
            with client_at(port) as client:
                assert client.get("/v1/jobs").status_code == 200
        assert idle[0].recv(1) == b""  # the longest idle one went first
        idle[-1].sendall(HEALTH)
        assert idle[-1].recv(100).startswith(b"HTTP/1.1 200")
    lines = [record.getMessage() for record in caplog.records if record.name == connections.__name__]
    assert lines == ["9 connections, and there may be 8: those without a request are closed"]


def test_requests_are_not_ended_for_others(port: int) -> None:
    """Where each connection has one, the next is refused at once, and may come again."""
    head = f"POST /v1/kernels?n=16&device=h200&wait=0 HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(npy_file())}"
    with ExitStack() as stack:
        busy = connected(port, MOST, stack)
        for one in busy:
            one.sendall(f"{head}\r\nExpect: 100-continue\r\n\r\n".encode())
            assert one.recv(100).startswith(b"HTTP/1.1 100")
        with socket.create_connection(("127.0.0.1", port), timeout=20) as late:
            answer = b"".join(iter(lambda: late.recv(1000), b""))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 2\r\n" in answer
        for one in busy:
            one.sendall(npy_file())
            assert one.recv(100).startswith(b"HTTP/1.1 202")
        with client_at(port) as client:  # the place of one that has its answer
            assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("first", [b"", HEALTH], ids=["new", "kept alive"])
def test_a_head_that_does_not_end(monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    """Whatever comes of it: uvicorn's own deadline begins anew with each byte, and with none before the first."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with served(workers=0) as port, socket.create_connection(("127.0.0.1", port), timeout=0.05) as slow:
        slow.sendall(first)
        ends = []

        def is_closed() -> bool:
            try:
                slow.sendall(b"G" if not ends else b"E")
                ends.append(slow.recv(1000))
            except TimeoutError:
                ends.append(b"...")
            except ConnectionError:
                return True
            return ends[-1] == b""

        wait_until(is_closed)


def test_requests_on_one_connection_have_no_deadline_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with served(workers=0) as port, socket.create_connection(("127.0.0.1", port), timeout=20) as one:
        for _ in range(4):
            one.sendall(HEALTH * 2)  # the second is here before the first is answered
            got = b""
            while got.count(b'{"status":"ok"}') < 2:
                more = one.recv(1000)
                assert more
                got += more
            time.sleep(0.2)


def test_an_answer_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "UNREAD_SECONDS", 1)
    with served(workers=0) as port, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", port))
        deaf.sendall(HEALTH.replace(b"healthz", b"openapi.json") * 200)

        wait_until(lambda: held(port))
        wait_until(lambda: not held(port), 60)


def held(port: int) -> list[object]:
    """The connections that a service of this process has on a port."""
    found = psutil.Process().net_connections("tcp")
    return [one for one in found if one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED]


def test_descriptors_that_run_out_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    door, loop = Door(MOST), asyncio.new_event_loop()
    context = {
        "message": "socket.accept() out of system resource",
        "exception": OSError(errno.EMFILE, "Too many open files"),
        "socket": object(),
    }
    for _ in range(100):
        door.report(loop, context)
    assert [record.getMessage() for record in caplog.records] == [
        "no connection can be accepted now: [Errno 24] Too many open files"
    ]
    door.report(loop, {"message": "anything else"})
    assert caplog.records[-1].getMessage() == "anything else"
    loop.close()


def test_the_limit_is_below_that_of_files() -> None:
    assert [most_connections(files) for files in (40, 64, 1024, 1 << 20)] == [4, 16, 496, 524_272]


def test_the_address_is_said_once_requests_are_taken() -> None:
    (listener,) = main.listen("127.0.0.1", 0)
    answers: list[int] = []

    def ask() -> None:
        answers.append(httpx2.get(f"http://127.0.0.1:{listener.getsockname()[1]}/healthz", timeout=60).status_code)
        server.should_exit = True

    asker = threading.Thread(target=ask)

    def announced() -> None:
        assert server.started  # uvicorn accepts
        asker.start()

    server = http_server.Server(new_service(), announced)
    server.run(sockets=[listener])
    asker.join()
    assert answers == [200]
