"""Access log: a line and a count for every request, and the id that ties its log lines together."""

import asyncio
import re
import secrets
import time
from typing import Any
from urllib.parse import quote

import structlog
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lospmm_server.faults import Stopping
from lospmm_server.heads import Heads
from lospmm_server.logs import about_request
from lospmm_server.metrics import Metrics
from lospmm_server.problems import describe, problem_response
from lospmm_server.unread import Unread

HEADER = "X-Request-ID"

#: An id that a proxy gave is kept if it looks like one.
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

#: Routes that programs call every few seconds: they are not logged, or the log would hold nothing else.
UNSEEN = frozenset({"/healthz", "/readyz", "/metrics"})

#: The most characters of a path that are logged.
PATH_CHARACTERS = 200

_log = structlog.stdlib.get_logger(__name__)


class ObservedApp(FastAPI):
    """An application inside ``Heads`` and ``AccessLog``.

    Middleware that is added the usual way is inside the handler of unexpected errors, and would not see their
    answers.
    """

    def __init__(self, metrics: Metrics, **options: Any) -> None:
        super().__init__(**options)
        self.metrics = metrics

    def build_middleware_stack(self) -> ASGIApp:
        """Return the application's middleware inside ``Heads``, ``AccessLog`` and ``Unread``."""
        return Unread(AccessLog(Heads(super().build_middleware_stack()), self.metrics))


class AccessLog:
    """ASGI middleware that logs and counts requests; everything inside logs with the request's id."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request and log it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        status = 0  # no answer: the client left, or the process is ending

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        started = time.monotonic()
        with about_request(request_id):
            try:
                await self._app(scope, receive, answer)
            except asyncio.CancelledError:  # the server is ending and stops waiting for this request
                if status:
                    raise
                stopping = Stopping()
                await problem_response(describe(stopping), stopping.headers)(scope, receive, answer)
            except Exception:
                if not status:
                    raise
                _log.exception("a request failed unexpectedly")  # it was answered; the server would log it without id
            finally:
                self._served(scope, status, time.monotonic() - started)

    def _served(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "")  # the router writes it into the scope
        self._metrics.request_served(route, scope["method"], status, seconds)
        if (route in UNSEEN and status < 400) or scope.get("state", {}).get("has_wrong_key"):  # ``guesses`` logs those
            return
        _log.info(
            "request",
            method=scope["method"],
            path=quote(scope["path"][:PATH_CHARACTERS], errors="replace"),
            route=route or None,
            status=status or None,
            seconds=round(seconds, 6),
        )


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(HEADER, "")
    return given if _ID.fullmatch(given) else secrets.token_hex(8)
