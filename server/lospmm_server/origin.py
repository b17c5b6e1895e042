"""Origin checks: without keys, everybody on this machine may call, but no web page in a browser on it."""

import re
from ipaddress import ip_address

from fastapi import HTTPException, Request

#: A name or an address, with or without a port; anything else is refused.
_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+)(?::[0-9]{1,5})?")


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is this machine's own, without a look-up."""
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
    """Raise HTTPException 403 for a request that another site's page sends through its reader's browser.

    The browser says so in Sec-Fetch-Site; for an address without TLS that is not this machine's it does not, nor did
    old browsers, and then Origin names the site of a page that posts. Neither helps if a foreign name was made to
    resolve to the loopback address (DNS rebinding): then the header Host has that name. A service that ``is_open`` to
    everybody on this machine checks it; one with keys may have any name, and such a page has no key. If a browser
    stores the key as a password, it sends it with other sites' posts too.
    """
    if _is_foreign(request):
        raise HTTPException(403, "a web page of another site sent this request")
    if not is_open:
        return
    hosts = request.headers.getlist("host")
    named = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if named is None or not is_loopback(named["name"].strip("[]")):
        raise HTTPException(403, "the header Host must name localhost or a loopback address")
