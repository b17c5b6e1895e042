"""Requests as bytes over sockets of their own, so that they may be as wrong as one likes, and what is answered."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

PROBLEM = "application/problem+json"

#: How long an answer may take before there is none.
ANSWER_SECONDS = 300.0

_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Answer:
    """``status`` is 0 where the connection ended without one."""

    status: int
    media_type: str
    body: bytes

    @property
    def problem(self) -> dict[str, Any]:
        """Of an answer of the service itself; empty for one of its HTTP parser."""
        return dict(json.loads(self.body)) if self.media_type == PROBLEM else {}


def head(line: str, *headers: str) -> bytes:
    """The head of a request after which the connection ends; ``line`` is such as ``GET /v1/jobs``."""
    lines = (f"{line} HTTP/1.1", "Host: localhost", "Connection: close", *headers)
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


async def send(port: int, request: bytes, *, leaves: bool = False, seconds: float = ANSWER_SECONDS) -> Answer:
    """Send a request while reading, since a refusal does not wait for the body; then close if the client ``leaves``.

    A request that is cut short waits until the service ends it.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sending = asyncio.create_task(_send(writer, request, leaves=leaves))
    try:
        return _parsed(await asyncio.wait_for(_answer(reader), seconds))
    except TimeoutError:
        return Answer(0, "", b"")
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def _send(writer: asyncio.StreamWriter, request: bytes, *, leaves: bool) -> None:
    view = memoryview(request)
    for start in range(0, len(view), _PIECE):
        writer.write(view[start : start + _PIECE])
        await writer.drain()
    if leaves:
        writer.write_eof()


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """Up to its end by Content-Length, or that of the connection, in which case it may be cut."""
    found = b""
    try:
        while piece := await reader.read(_PIECE):
            found += piece
            head, blank, body = found.partition(b"\r\n\r\n")
            if blank and len(body) >= int(_headers(head).get("content-length", 1 << 62)):
                break
    except ConnectionError:
        pass
    return found


def _parsed(answer: bytes) -> Answer:
    head, blank, body = answer.partition(b"\r\n\r\n")
    if not blank:
        return Answer(0, "", b"")
    return Answer(int(head.split()[1]), _headers(head).get("content-type", "").partition(";")[0], body)


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
