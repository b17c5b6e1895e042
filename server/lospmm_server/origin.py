"""Who may ask: without keys, everybody on this machine, but no web page that a browser on it has open."""

import re
from ipaddress import ip_address

from fastapi import HTTPException, Request

#: A name or an address with a port or without; what is not in this form is not guessed at.
_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+)(?::[0-9]{1,5})?")


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own, without a look-up."""
    try:
        return host.lower() == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _is_foreign(request: Request) -> bool:
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None or origin is None:
        return site in ("cross-site", "same-site")
    return origin.lower().partition("://")[2] != request.headers.get("host", "").lower()


def refuse_foreign_pages(request: Request, *, is_open: bool) -> None:
    """Raises HTTPException 403 for what a page of another site has its reader's browser send.

    The browser says so in Sec-Fetch-Site; to an address without TLS that is not this machine's it does not, nor did it
    always, and then Origin names the site of a page that posts. Neither helps where a foreign name was made to resolve
    to the loopback address (DNS rebinding): then the header Host carries that name. A service that ``is_open`` to
    everybody on this machine looks at it; one with keys has any name, and such a page has no key. Where a browser
    keeps the key as a password, it sends it with what other sites' pages post too.
    """
    if _is_foreign(request):
        raise HTTPException(403, "a web page of another site sent this request")
    if not is_open:
        return
    hosts = request.headers.getlist("host")
    named = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if named is None or not is_loopback(named["name"].strip("[]")):
        raise HTTPException(403, "the header Host must name localhost or a loopback address")
