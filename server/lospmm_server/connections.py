"""Connections: a deadline for those that send no request, and a limit below that of open files.

uvicorn closes a connection that was silent for 5 s after a request, but waits for ever for the first request and for
the rest of a head, and accepts until no descriptor is left. Bodies have LOSPMM_UPLOAD_SECONDS (``uploads.py``).
"""

import asyncio
import logging
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from lospmm_server.faults import RETRY_SECONDS

#: Seconds from the begin of a connection, or the end of an answer, until the next request's head must be there.
HEAD_SECONDS = 10.0

#: Connections that asyncio accepts in one turn of its loop; it takes four turns until those of the first are seen here.
ACCEPTED_AT_ONCE = 4

#: Open files of the process itself: listeners, databases, cache, logs. Each connection may have an upload beside it.
OWN_FILES = 32

#: Seconds between two log lines about too many connections.
TELL_SECONDS = 60.0

_REFUSAL = (
    "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n"
    f"Retry-After: {RETRY_SECONDS}\r\n\r\n"
).encode()

_log = logging.getLogger(__name__)


def most_connections(files: int) -> int:
    """Return the most connections of a process that may open so many files."""
    return max(ACCEPTED_AT_ONCE, (files - OWN_FILES) // 2)


class Door:
    """The connections of a server, at most ``most``: if it is full, the longest idle one is closed."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.idle: dict[GuardedConnection, None] = {}  # those without a request, the longest idle first
        self._told: float | None = None

    def lets_in(self, count: int) -> bool:
        """Return whether the last of ``count`` connections may stay; closes another for it if need be."""
        if count <= self.most:
            return True
        self.tell(f"{count} connections, and there may be {self.most}: those without a request are closed")
        if not self.idle:
            return False
        next(iter(self.idle)).close_idle()
        return True

    def tell(self, what: str) -> None:
        """Log this, unless something of the kind was logged within TELL_SECONDS."""
        now = time.monotonic()
        if self._told is None or now - self._told > TELL_SECONDS:
            self._told = now
            _log.warning("%s", what)

    def report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception of the event loop: asyncio logs each attempt to accept without a free descriptor."""
        if "socket" in context and "out of system resource" in context["message"]:
            self.tell(f"no connection can be accepted now: {context['exception']}")
        else:
            loop.default_exception_handler(context)


class GuardedConnection(H11Protocol):
    """A connection that is closed unless its next request's head comes in time."""

    def __init__(self, door: Door, **options: Any) -> None:
        super().__init__(**options)
        self._door = door
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def _is_idle(self) -> bool:
        return (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, or refuse to."""
        super().connection_made(transport)
        if self._door.lets_in(len(self.connections)):
            self._await_head()
        else:
            transport.write(_REFUSAL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        super().data_received(data)
        if not self._is_idle:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Wait for the next request; one may be here already."""
        super().on_response_complete()
        if self._is_idle:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_waiting()
        super().connection_lost(exc)

    def close_idle(self) -> None:
        """Close the connection, which has no request."""
        self._stop_waiting()
        self.timeout_keep_alive_handler()

    def _await_head(self) -> None:
        self._door.idle[self] = None
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.close_idle)

    def _stop_waiting(self) -> None:
        self._door.idle.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
