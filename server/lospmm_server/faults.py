"""What can go wrong in the service beside ``lospmm.errors``; ``problems.ERRORS`` says what clients are told of each."""

from collections.abc import Mapping
from typing import ClassVar

from lospmm.errors import LospmmError

#: What a client is told to wait before it asks again, in seconds.
RETRY_SECONDS = 2


class DatabaseFault(LospmmError):
    """The database cannot be reached, or refuses to work. It may be back at any time."""

    exit_code = 4
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": str(RETRY_SECONDS)}


class Busy(LospmmError):
    """Too many jobs are under way already."""

    headers: ClassVar[Mapping[str, str]] = {"Retry-After": str(RETRY_SECONDS)}


class Stopping(LospmmError):
    """The process is about to end. Another may take its place."""

    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "10"}

    def __init__(self, message: str = "the service is stopping; post again later") -> None:
        super().__init__(message)


class GaveUp(LospmmError):
    """A job has ended its worker too often."""


class OutOfTime(LospmmError):
    """A job took longer than it may."""


class Cancelled(LospmmError):
    """Somebody cancelled the job."""


class LayersFailed(LospmmError):
    """Some layers of a model have no kernel."""
