"""Wrong API keys: clients that send many are refused, and the log has at most a line a second about them.

A valid key is always let in: other clients may share the address, as behind a proxy, and a key of 256 random bits
cannot be found by trying.
"""

import logging
import time
from collections import OrderedDict
from ipaddress import IPv6Address, ip_address

from lospmm_server.faults import TooManyGuesses

#: Wrong keys of an address that are answered as such in PERIOD_SECONDS.
ALLOWED = 10
PERIOD_SECONDS = 60.0

#: The most addresses that are remembered, and the bytes of an IPv6 address that a client does not choose.
ADDRESSES = 4096
NETWORK_BYTES = 8

#: Seconds between two log lines.
TELL_SECONDS = 1.0

_log = logging.getLogger(__name__)


class Guesses:
    """The wrong keys of the last minute, counted by address; of one event loop."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str | bytes, tuple[float, int]] = OrderedDict()  # since when; the oldest first
        self._untold, self._told = 0, -TELL_SECONDS

    def add(self, address: str) -> None:
        """Count and log a wrong key. Raises TooManyGuesses after ALLOWED in PERIOD_SECONDS."""
        now, origin = time.monotonic(), _origin(address)
        self._tell(now, address)
        since, count = self._counts.get(origin, (now, 0))
        if now - since > PERIOD_SECONDS:
            del self._counts[origin]
            since, count = now, 0
        self._counts[origin] = since, count + 1
        if len(self._counts) > ADDRESSES:
            self._counts.popitem(last=False)
        if count >= ALLOWED:
            raise TooManyGuesses(1 + int(since + PERIOD_SECONDS - now))

    def _tell(self, now: float, address: str) -> None:
        self._untold += 1
        if now - self._told >= TELL_SECONDS:
            _log.warning("%d requests with wrong API keys, the last from %s", self._untold, address)
            self._untold, self._told = 0, now


def _origin(address: str) -> str | bytes:
    """Return the part of an address that its client does not choose."""
    try:
        found = ip_address(address)
    except ValueError:  # a socket without one
        return address
    return found.packed[:NETWORK_BYTES] if isinstance(found, IPv6Address) and not found.ipv4_mapped else address
