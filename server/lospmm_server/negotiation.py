"""The media type of an answer, from the header Accept (RFC 9110, section 12.5.1)."""

import re
from collections.abc import Sequence

from fastapi import HTTPException

_QUALITY = re.compile(r"q=(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)", re.IGNORECASE)


def negotiate(accept: str, offered: Sequence[str]) -> str:
    """Return the offered media type that the client prefers, the first of equals.

    No header is the same as ``*/*``. Malformed parts are ignored. Raises HTTPException 406 if none is acceptable.
    """
    ranges = dict(_media_range(part) for part in (accept.strip() or "*/*").split(","))
    best = max(offered, key=lambda media: _quality(ranges, media))
    if _quality(ranges, best) == 0:
        raise HTTPException(406, f"Accept: {accept[:200]}: expected one of {', '.join(offered)}")
    return best


def _media_range(text: str) -> tuple[str, float]:
    """Parse ``type/subtype;q=0.5`` as its range, in lower case, and its quality."""
    media, *parameters = (part.strip() for part in text.split(";"))
    found = (_QUALITY.fullmatch(parameter) for parameter in parameters)
    return media.lower(), next((float(match[1]) for match in found if match), 1.0)


def _quality(ranges: dict[str, float], media: str) -> float:
    """Return the quality of the most specific range that ``media`` falls into; 0 for none."""
    names = (media, f"{media.partition('/')[0]}/*", "*/*")
    return next((ranges[name] for name in names if name in ranges), 0.0)
