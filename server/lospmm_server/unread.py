"""Delivery of refusals: the rest of a refused body is read for a while.

A connection that is closed with unread data is reset, and an answer that the client has not read is lost with it (RFC
9112, section 9.6).
"""

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Bytes of a refused body that are read at most, and for how many seconds.
READ_BYTES = 16 << 20
READ_SECONDS = 2.0


class Unread:
    """ASGI middleware outside everything slow: it holds back the end of a refusal, not its content."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http" or not _has_body(headers := Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        is_coming = "expect" not in headers  # a client that waits for 100 (Continue) sends nothing yet
        is_refused = is_held = False

        async def read() -> Message:
            nonlocal is_coming
            message = await receive()
            is_coming = _goes_on(message)
            return message

        async def answer(message: Message) -> None:
            nonlocal is_refused, is_held
            if message["type"] == "http.response.start":
                is_refused = message["status"] >= 400 and message["status"] != 408  # of a 408 nothing came
            elif is_refused and is_coming and not message.get("more_body", False):
                is_held, message = True, {**message, "more_body": True}
            await send(message)

        try:
            await self._app(scope, read, answer)
        finally:
            if is_held:
                await _read_on(receive)
                await send({"type": "http.response.body", "body": b""})


async def _read_on(receive: Receive) -> None:
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(READ_SECONDS):
            while size < READ_BYTES and _goes_on(message := await receive()):
                size += len(message["body"])


def _goes_on(message: Message) -> bool:
    return message["type"] == "http.request" and bool(message.get("more_body", False))


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
