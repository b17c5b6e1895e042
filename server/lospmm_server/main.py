"""``lospmm serve``: the service on a loopback address, until SIGTERM or Ctrl-C."""

import os
import signal
import socket
import sys
from ipaddress import ip_address

import uvicorn

from lospmm import jobs
from lospmm.errors import BadRequest
from lospmm_server.app import create_app
from lospmm_server.workshop import Workshop

#: How long an orderly end waits for uploads and answers that are under way, in seconds.
LEAVE_SECONDS = 3


class _Server(uvicorn.Server):
    def __init__(self, workshop: Workshop) -> None:
        super().__init__(uvicorn.Config(create_app(workshop), timeout_graceful_shutdown=LEAVE_SECONDS))
        self._workshop = workshop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the jobs before the connections: those that wait for a job then get their answer at once."""
        self._workshop.stop()
        await super().shutdown(sockets)


def run(host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT, which end the process in seconds and its compilers with it.

    Raises BadRequest for an address that is not this machine's own or cannot be listened on.
    """
    listeners = listen(host, port)
    for listener in listeners:
        print(f"lospmm serves {_url(listener)}, described at {_url(listener)}/docs", file=sys.stderr, flush=True)
    # At the end uvicorn raises the signal again. It must then end the process: Python would first wait for the
    # threads, and one may be in the middle of a stage that cannot be interrupted.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _Server(Workshop(jobs.open_store())).run(sockets=listeners)


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of ``host``. Raises BadRequest."""
    if not 0 <= port < 2**16:
        raise BadRequest(f"port {port}: expected 0 to {2**16 - 1}")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise BadRequest(f"host {host!r}: {error}") from None
    for *_, address in found:
        if not ip_address(address[0]).is_loopback:
            raise BadRequest(
                f"host {host!r} is {address[0]}, which other machines can reach: this version has no API keys and "
                "serves loopback addresses only (authentication comes with the rest of the service); use 127.0.0.1"
            )
    try:
        return [socket.create_server(address[:2], family=family) for family, *_, address in found]
    except OSError as error:  # its text repeats the address
        reason = os.strerror(error.errno) if error.errno else error
        raise BadRequest(f"{host} port {port}: {reason}; choose another with --port") from None


def _url(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"
