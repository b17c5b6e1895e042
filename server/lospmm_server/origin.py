"""Who may ask: without keys, everybody on this machine, but no web page that a browser on it has open."""

from ipaddress import ip_address

from fastapi import HTTPException, Request


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own, without a look-up."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


async def refuse_foreign_pages(request: Request) -> None:
    """Raises HTTPException 403 for what a page of another site has its reader's browser send.

    The browser says so in Sec-Fetch-Site, except where a foreign name was made to resolve to the loopback address
    (DNS rebinding): then the header Host carries that name.
    """
    if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise HTTPException(403, "a web page of another site sent this request")
    if not is_loopback(request.url.hostname or ""):
        raise HTTPException(403, "the header Host must name localhost or a loopback address")
