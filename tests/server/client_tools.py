"""Clients of services that run as processes, and what gets between them."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.server import HTTPServer
from typing import Any

import httpx2

from lospmm.client.client import Client
from tests.server.processes import SERVE

SLOW = {"device": "h200", "emitter": "ptx"}  # it needs the compiler that a slow toolkit holds


@contextmanager
def client_of(port: int, **options: Any) -> Iterator[Client]:
    with Client(f"http://127.0.0.1:{port}", **options) as client:
        yield client


@contextmanager
def in_background() -> Iterator[Callable[..., "Future[Any]"]]:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


@contextmanager
def threaded(server: HTTPServer) -> Iterator[int]:
    """The port of a server that runs in a thread during the block."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def serve_at(port: int) -> tuple[str, ...]:
    return (*SERVE[:-1], str(port))


def altered(client: Client, change: Callable[[httpx2.Request, httpx2.Response], httpx2.Response | None]) -> None:
    """Put something between the client and its service that answers differently, or breaks off where it says None."""
    wire = httpx2.HTTPTransport()

    class Between(httpx2.BaseTransport):
        def close(self) -> None:
            wire.close()

        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            answer = wire.handle_request(request)
            answer.request = request
            answer.read()
            answer = httpx2.Response(answer.status_code, headers=answer.headers, content=answer.content)
            changed = change(request, answer)
            if changed is None:
                raise httpx2.RemoteProtocolError("peer closed connection without sending complete message body")
            return changed

    inside = client._connection
    inside.close()
    inside._http = httpx2.Client(base_url=inside.url, transport=Between())
