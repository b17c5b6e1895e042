"""Detection of dead workers: those whose jobs had no new beat while this process observed them for long enough.

Only the observer's own monotonic clock counts. So it does not matter when a machine's time of day jumps, or whether
two machines agree on it.
"""

import os
import secrets
import socket
import time
from collections.abc import Mapping

from lospmm_server import queue
from lospmm_server.database import Database

#: Seconds between a worker's beats, and without a beat after which it counts as dead.
BEAT_SECONDS = 3.0
LEASE_SECONDS = 20.0

#: Seconds between two observations. After a longer gap, earlier ones do not count: this process was asleep, or the
#: database was away, so that no worker could beat.
LOOK_SECONDS = 2.0
LATE_SECONDS = 5.0

#: Seconds that an orderly end waits for a job that was told to stop: some stages cannot be interrupted.
GRACE_SECONDS = 3.0

Job = tuple[str, str]  # digest and owner


def new_name() -> str:
    """Return a name that no other worker has."""
    return f"{socket.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(4)}"


class Lookout:
    """The observations of one process; not thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[Job, tuple[int, float]] = {}  # a beat, and when it was first seen
        self._looked: float | None = None

    def expired(self, beats: Mapping[Job, int], now: float) -> dict[Job, int]:
        """Return the jobs whose beat has not changed for LEASE_SECONDS at ``now`` (time.monotonic)."""
        if self._looked is None or now - self._looked > LATE_SECONDS:
            self._seen.clear()
        self._looked = now
        self._seen = {
            job: known if (known := self._seen.get(job)) and known[0] == beat else (beat, now)
            for job, beat in beats.items()
        }
        return {job: beat for job, (beat, since) in self._seen.items() if now - since >= LEASE_SECONDS}

    def release_expired(self, database: Database) -> list[str]:
        """Take the jobs of dead workers from them; return their digests. Raises DatabaseFault."""
        if self._looked is not None and time.monotonic() - self._looked < LOOK_SECONDS:
            return []
        found = self.expired(queue.running(database), time.monotonic())
        return [digest for (digest, owner), beat in found.items() if queue.release(database, digest, owner, beat)]
