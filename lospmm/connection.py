"""Requests to the REST service that go on while it is away for a while: started again, busy, or out of reach.

Every request of the client may be sent again: the same matrix and options are the same job. Times are of a monotonic
clock.
"""

import hashlib
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from lospmm.errors import BadRequest, ServiceFault
from lospmm.remote import error_of, problem_of
from lospmm.terminal import printable

#: How long one answer may take to begin, and how long an upload or an answer may stand still, in seconds.
CONNECT_SECONDS = 10.0
STILL_SECONDS = 60.0

#: How long a service that has never answered is asked again: its address is probably wrong.
STRANGER_SECONDS = 3.0

#: The first and the longest wait between two tries, in seconds.
BACKOFF_SECONDS = (0.2, 10.0)

#: The longest that a service may tell us to wait before we ask again.
MAX_RETRY_AFTER = 60.0

#: It is busy, stopping or away: these go by.
_PASSING = frozenset({429, 502, 503, 504})

_KEY = re.compile(r"[!-~]{1,200}")
_CHECKSUM = re.compile(r'(?:W/)?"([0-9a-f]{64})"')


class Gone(ServiceFault):
    """404: the service does not know the job or kernel (any more)."""


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent event."""

    id: str
    kind: str
    data: str


@dataclass(slots=True)
class _Tries:
    """How long one request has been tried in vain."""

    since: float
    pause: float = 0.0


class Connection:
    """To the service at ``url``.

    A service that is away or busy is waited for so long; ``waits`` is told why, once for each request that has to.
    """

    def __init__(
        self, url: str, key: str | None, *, patience_seconds: float, waits: Callable[[str], None] | None = None
    ) -> None:
        self.url = _checked(url)
        self._patience_seconds, self._waits = patience_seconds, waits
        self._has_answered, self._has_key = False, key is not None
        timeout = httpx2.Timeout(STILL_SECONDS, connect=CONNECT_SECONDS)
        self._http = httpx2.Client(base_url=self.url, headers=_authorization(key), timeout=timeout)

    def close(self) -> None:
        self._http.close()

    def ask(self, method: str, path: str, *, still_seconds: float = STILL_SECONDS, **request: Any) -> httpx2.Response:
        """The answer to a request, 2xx or 304. ``request`` is as for httpx2.

        Raises what the service's problem stands for, Gone for 404, ServiceFault where there is no answer in time.
        """
        timeout = httpx2.Timeout(still_seconds, connect=CONNECT_SECONDS)
        tries = _Tries(time.monotonic())
        while True:
            try:
                answer = self._http.request(method, path, timeout=timeout, **request)
            except (httpx2.TransportError, httpx2.DecodingError) as error:
                self._wait(tries, _reason(error))
                continue
            self._has_answered = True
            if answer.status_code in _PASSING:
                self._wait(tries, problem_of(answer).detail, answer)
            elif not _is_whole(answer):
                self._wait(tries, "the answer was damaged on its way: its sha256 is not that of its ETag")
            elif answer.is_success or answer.status_code == 304:
                return answer
            elif answer.status_code == 404:
                raise Gone(f"{self.url}: {problem_of(answer).detail}")
            elif answer.status_code == 401:
                asked = "does not take this API key" if self._has_key else "asks for an API key"
                raise BadRequest(f"{self.url}: {asked}; give one of its own with --key, LOSPMM_KEY or key=")
            else:
                raise error_of(problem_of(answer), self.url)

    def listen(self, path: str, after: str, deadline: float) -> Iterator[Event]:
        """The events from ``after`` on, until they end, the connection is lost or the time is up, without a word."""
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": after} if after else {})}
        still_seconds = min(STILL_SECONDS, max(1.0, deadline - time.monotonic()))
        timeout = httpx2.Timeout(still_seconds, connect=CONNECT_SECONDS)
        try:
            with self._http.stream("GET", path, headers=headers, timeout=timeout) as answer:
                if answer.status_code != 200 or not _is_stream(answer):
                    return
                yield from _events(answer, deadline)
        except httpx2.TransportError:  # whoever listens asks for the job then, which says more
            return

    def _wait(self, tries: _Tries, reason: str, answer: httpx2.Response | None = None) -> None:
        """Until the next try. Raises ServiceFault when there have been enough."""
        patience = self._patience_seconds if self._has_answered else min(STRANGER_SECONDS, self._patience_seconds)
        left = tries.since + patience - time.monotonic()
        if left <= 0:
            hint = "" if self._has_answered else "; does `lospmm serve` run there, by this address?"
            raise ServiceFault(f"{self.url}: {printable(reason)}; tried for {patience:g} s{hint}")
        if self._waits is not None and not tries.pause:
            self._waits(f"waiting for {self.url}: {printable(reason)}")
        shortest, longest = BACKOFF_SECONDS
        tries.pause = min(longest, max(shortest, 2 * tries.pause))
        asked = _retry_after({} if answer is None else answer.headers)
        # Not all of those who were sent away together come back together.
        time.sleep(min(left, asked if asked is not None else tries.pause) * random.uniform(0.7, 1.0))


def _checked(url: str) -> str:
    """The address without a slash at its end. Raises BadRequest, without the text: it may hold a password."""
    try:
        parsed = httpx2.URL(url.strip())
    except httpx2.InvalidURL as error:
        raise BadRequest(f"the address of the service: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        told = "" if "@" in url else f" is {printable(url.strip())[:80]!r}: it"
        raise BadRequest(f"the address of the service{told} must begin with http:// or https:// and name a host")
    if parsed.userinfo:
        raise BadRequest("the address of the service holds a password; give an API key with --key or LOSPMM_KEY")
    if parsed.query or parsed.fragment:
        raise BadRequest("the address of the service ends with its path: leave out what follows ? or #")
    return str(parsed).rstrip("/")


def _authorization(key: str | None) -> dict[str, str]:
    if key is None:
        return {}
    if not _KEY.fullmatch(key):
        raise BadRequest("the API key is not one: `lospmm keys add` prints them, letters and digits without spaces")
    return {"Authorization": f"Bearer {key}"}


def _events(answer: httpx2.Response, deadline: float) -> Iterator[Event]:
    """Not httpx2's own reader: that one would not look at the clock while the service only says that it lives."""
    fields: dict[str, str] = {}
    for line in answer.iter_lines():
        if time.monotonic() > deadline:
            return
        name, colon, value = line.partition(":")
        if name and colon:  # each field is one line in a stream of the service
            fields[name] = value.removeprefix(" ")
        elif not line and fields:
            yield Event(fields.get("id", ""), fields.get("event", "message"), fields.get("data", ""))
            fields = {}


def _is_stream(answer: httpx2.Response) -> bool:
    return answer.headers.get("content-type", "").startswith("text/event-stream")


def _is_whole(answer: httpx2.Response) -> bool:
    """Whether the content is what the ETag of a kernel's file says."""
    named = _CHECKSUM.fullmatch(answer.headers.get("etag", ""))
    if answer.status_code != 200 or named is None:
        return True
    return hashlib.sha256(answer.content).hexdigest() == named[1]


def _retry_after(headers: Mapping[str, str]) -> float | None:
    text = headers.get("retry-after", "")
    return min(MAX_RETRY_AFTER, float(text)) if re.fullmatch(r"\d{1,9}", text) else None


def _reason(error: Exception) -> str:
    """Of a fault of the connection; some say nothing."""
    text = str(error) or type(error).__name__
    return "no answer in time" if isinstance(error, httpx2.TimeoutException) else text
