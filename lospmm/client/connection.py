"""HTTP requests to the REST service, repeated while it restarts, is busy, or is out of reach.

Every request of the client may be sent again: the same matrix and options are the same job. Times are of a monotonic
clock.
"""

import hashlib
import math
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from lospmm.client.answers import error_of, problem_of
from lospmm.errors import BadRequest, ServiceFault, printable

#: Seconds until an answer must begin, and that an upload or an answer may stall.
CONNECT_SECONDS = 10.0
STILL_SECONDS = 60.0

#: Seconds of retries for a service that has never answered: its address is probably wrong.
STRANGER_SECONDS = 3.0

#: The first and the longest wait between two tries, in seconds.
BACKOFF_SECONDS = (0.2, 10.0)

#: The longest Retry-After that is obeyed, in seconds.
MAX_RETRY_AFTER = 60.0

#: Statuses of a busy, stopping or unreachable service, which are temporary.
_PASSING = frozenset({429, 502, 503, 504})

#: Headers of the transfer, not of the content.
_OF_THE_WAY = frozenset({"content-encoding", "content-length", "transfer-encoding"})

_KEY = re.compile(r"[!-~]{1,200}")
_CHECKSUM = re.compile(r'(?:W/)?"([0-9a-f]{64})"')


class Gone(ServiceFault):
    """404: the service does not know the job or kernel (any more)."""


@dataclass(slots=True)
class _Tries:
    """How long one request has been tried without success."""

    since: float
    deadline: float
    pause: float = 0.0


class Connection:
    """A connection to the service at ``url``.

    A service that is away or busy is waited for so long; ``waits`` is called with the reason, once for each such
    request.
    """

    def __init__(
        self, url: str, key: str | None, *, patience_seconds: float, waits: Callable[[str], None] | None = None
    ) -> None:
        self.url = _checked(url)
        self._patience_seconds, self._waits = patience_seconds, waits
        self._has_answered, self._has_key = False, key is not None
        timeout = httpx2.Timeout(STILL_SECONDS, connect=CONNECT_SECONDS)
        headers = _authorization(key)
        try:
            self._http = httpx2.Client(base_url=self.url, headers=headers, timeout=timeout)
        except (ImportError, OSError, ValueError) as error:
            # Of a proxy or of certificates, which the environment names.
            why = f"what the environment says of connections cannot be used: {error}"
            raise BadRequest(f"{why}; see HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and SSL_CERT_DIR") from None

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def ask(
        self,
        method: str,
        path: str,
        *,
        still_seconds: float = STILL_SECONDS,
        deadline: float = math.inf,
        **request: Any,
    ) -> httpx2.Response:
        """Send a request and return its answer, 2xx or 304; ``request`` is as for httpx2.

        Raises what the service's problem stands for, Gone for 404, ServiceFault where there is no answer in time, or
        by the ``deadline``.
        """
        tries = _Tries(time.monotonic(), deadline)
        while True:
            still_seconds = min(still_seconds, max(1.0, deadline - time.monotonic()))
            timeout = httpx2.Timeout(still_seconds, connect=min(still_seconds, CONNECT_SECONDS))
            try:
                answer = self._answer(method, path, deadline, timeout=timeout, **request)
            except (httpx2.TransportError, httpx2.DecodingError) as error:
                self._wait(tries, _reason(error))
                continue
            self._has_answered = True
            if _passes(answer):
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

    def _answer(self, method: str, path: str, deadline: float, **request: Any) -> httpx2.Response:
        """Read an answer whole, or until the deadline."""
        with self._http.stream(method, path, **request) as answer:
            content = bytearray()
            for part in answer.iter_bytes():
                content += part
                if time.monotonic() > deadline:
                    raise httpx2.ReadTimeout("its answer is not whole yet")
        headers = [(name, value) for name, value in answer.headers.multi_items() if name not in _OF_THE_WAY]
        return httpx2.Response(answer.status_code, headers=headers, content=bytes(content), request=answer.request)

    def _wait(self, tries: _Tries, reason: str, answer: httpx2.Response | None = None) -> None:
        """Wait until the next try. Raises ServiceFault after enough of them."""
        patience = self._patience_seconds if self._has_answered else min(STRANGER_SECONDS, self._patience_seconds)
        now = time.monotonic()
        left = min(tries.since + patience, tries.deadline) - now
        if left <= 0:
            hint = "" if self._has_answered else "; does `lospmm serve` run there, by this address?"
            tried = patience if now < tries.deadline else max(0.0, now - tries.since)
            raise ServiceFault(f"{self.url}: {printable(reason)}; tried for {tried:.3g} s{hint}")
        if self._waits is not None and not tries.pause:
            self._waits(f"waiting for {self.url}: {printable(reason)}")
        shortest, longest = BACKOFF_SECONDS
        tries.pause = min(longest, max(shortest, 2 * tries.pause))
        pause = max(tries.pause, 0.0 if answer is None else _retry_after(answer.headers))
        # Random, so that clients that were refused together do not all retry together; never too early.
        time.sleep(min(left, pause * random.uniform(1.0, 1.4)))


def _checked(url: str) -> str:
    """Return the address without a slash at its end.

    Raises BadRequest, without the text: it may hold a password.
    """
    try:
        parsed = httpx2.URL(url.strip())
        parsed.host.encode("idna")
    except (httpx2.InvalidURL, UnicodeError) as error:
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


def _is_whole(answer: httpx2.Response) -> bool:
    """Return whether the content matches the ETag of a kernel's file."""
    named = _CHECKSUM.fullmatch(answer.headers.get("etag", ""))
    if answer.status_code != 200 or named is None:
        return True
    return hashlib.sha256(answer.content).hexdigest() == named[1]


def _passes(answer: httpx2.Response) -> bool:
    """Return whether the same request may be answered in a while.

    A 500 without a problem comes from a server that was stopped in the middle of a request.
    """
    is_problem = answer.headers.get("content-type", "").startswith("application/problem+json")
    return answer.status_code in _PASSING or (answer.status_code == 500 and not is_problem)


def _retry_after(headers: Mapping[str, str]) -> float:
    text = headers.get("retry-after", "")
    return min(MAX_RETRY_AFTER, float(text)) if re.fullmatch(r"\d{1,9}", text) else 0.0


def _reason(error: Exception) -> str:
    """Return the text of a connection's error, or its name if it has none."""
    text = str(error) or type(error).__name__
    return "no answer in time" if isinstance(error, httpx2.TimeoutException) else text
