"""Which workers have died: those whose jobs had no new beat for as long as we have looked on.

Only the looker's own monotonic clock counts. So it does not matter when a machine's time of day jumps, or whether two
machines agree on it.
"""

import os
import secrets
import socket
import time
from collections.abc import Mapping

from lospmm_server import queue
from lospmm_server.database import Database

#: A worker says that it lives this often, and counts as dead after so long, in seconds.
BEAT_SECONDS = 3.0
LEASE_SECONDS = 20.0

#: How often somebody looks. A look that comes this much later says nothing of what went before: the looker was asleep,
#: or the database was away, and nobody could say that he lives.
LOOK_SECONDS = 2.0
LATE_SECONDS = 5.0

#: How long an orderly end waits for a job that has been told to stop: some stages cannot be interrupted.
GRACE_SECONDS = 3.0

Job = tuple[str, str]  # digest and owner


def new_name() -> str:
    """Return a name that no other worker has."""
    return f"{socket.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(4)}"


class Lookout:
    """What one looker has seen. Not for several threads."""

    def __init__(self) -> None:
        self._seen: dict[Job, tuple[int, float]] = {}  # a beat, and since when we have known it
        self._looked: float | None = None

    def expired(self, beats: Mapping[Job, int], now: float) -> dict[Job, int]:
        """The jobs whose beat has stood still for LEASE_SECONDS, of those that run at ``now`` (time.monotonic)."""
        if self._looked is None or now - self._looked > LATE_SECONDS:
            self._seen.clear()
        self._looked = now
        self._seen = {
            job: known if (known := self._seen.get(job)) and known[0] == beat else (beat, now)
            for job, beat in beats.items()
        }
        return {job: beat for job, (beat, since) in self._seen.items() if now - since >= LEASE_SECONDS}

    def release_expired(self, database: Database) -> list[str]:
        """Take the jobs of dead workers from them; their digests. Raises DatabaseFault."""
        if self._looked is not None and time.monotonic() - self._looked < LOOK_SECONDS:
            return []
        found = self.expired(queue.running(database), time.monotonic())
        return [digest for (digest, owner), beat in found.items() if queue.release(database, digest, owner, beat)]
