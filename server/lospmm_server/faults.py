"""Errors of the service beside ``lospmm.errors``; ``problems.ERRORS`` has the answer to each."""

from collections.abc import Mapping
from typing import ClassVar

from lospmm.errors import LospmmError

#: Retry-After, in seconds.
RETRY_SECONDS = 2


class DatabaseFault(LospmmError):
    """A database that cannot be reached, or refuses to work. It may be back at any time."""

    exit_code = 4


class Busy(LospmmError):
    """Too many jobs wait or run already."""


class TooManyGuesses(LospmmError):
    """Wrong API keys from one address; it may try others in ``seconds``."""

    def __init__(self, seconds: int) -> None:
        super().__init__("this address sent too many wrong API keys; only a valid one is let in now")
        self.headers = {"Retry-After": str(seconds)}


class Stopping(LospmmError):
    """The process is about to end. Another may take its place."""

    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "10"}

    def __init__(self, message: str = "the service is stopping; post again later") -> None:
        super().__init__(message)


class GaveUp(LospmmError):
    """A job that has ended its worker too often."""


class OutOfTime(LospmmError):
    """A job that took longer than the limit."""


class Cancelled(LospmmError):
    """A job that was cancelled."""

    def __init__(self, message: str = "the job was cancelled; post it again to have it done") -> None:
        super().__init__(message)


class LayersFailed(LospmmError):
    """A model some of whose layers have no kernel."""
