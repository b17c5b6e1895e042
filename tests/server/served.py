"""The service in this process: real connections, its server in one thread and a worker in another.

It starts in hundredths of a second. ``lospmm serve`` and its worker (``processes.py``) take seconds: they are for tests
of processes, of their ends and of their settings.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from lospmm_server.http_server import Server
from lospmm_server.main import listen
from lospmm_server.service import Service
from tests.fixtures.waiting import wait_until
from tests.server.conftest import new_service, working


@contextmanager
def served(port: int = 0, *, workers: int = 1, asks_for_keys: bool = False) -> Iterator[int]:
    """The port of a service on the cache and the database of this test."""
    service = new_service(asks_for_keys=asks_for_keys)
    with working() if workers else nullcontext(), _listening(service, port) as own:
        yield own


@contextmanager
def _listening(service: Service, port: int) -> Iterator[int]:
    (listener,) = listen("127.0.0.1", port)
    server = Server(service)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()
