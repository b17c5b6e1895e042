"""Wake-ups of requests that wait for jobs: one query of the events for all that wait in this process."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from lospmm.errors import BadSettings
from lospmm_server import queries
from lospmm_server.database import Database
from lospmm_server.faults import DatabaseFault
from lospmm_server.keys import Caller, Keyring

#: Seconds between two queries while requests wait, and while the database is away.
POLL_SECONDS = 0.1
AWAY_SECONDS = 1.0

_log = logging.getLogger(__name__)


class Watch:
    """The waiting requests of one event loop; ``run`` is its task."""

    def __init__(self, database: Database, keyring: Keyring | None) -> None:
        self.is_stopping = False
        self._database, self._keyring = database, keyring
        self._callers: Mapping[str, Caller] = {}
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._somebody = asyncio.Event()

    @contextmanager
    def subscribed(self, jobs: Iterable[str]) -> Iterator[asyncio.Event]:
        """Yield an event that is set at each change of one of the jobs or of the keys, and when the service stops."""
        changed = asyncio.Event()
        ids = list(jobs)
        for job in ids:
            self._waiting.setdefault(job, set()).add(changed)
        self._somebody.set()
        if self.is_stopping:
            changed.set()
        try:
            yield changed
        finally:
            for job in ids:
                waiting = self._waiting.get(job, set())
                waiting.discard(changed)
                if not waiting:
                    self._waiting.pop(job, None)
            if not self._waiting:
                self._somebody.clear()

    def stop(self) -> None:
        """Wake all waiting requests."""
        self.is_stopping = True
        self.wake(list(self._waiting))

    async def run(self) -> None:
        """Wake waiting requests until this is cancelled; without any, the database is not queried."""
        cursor: int | None = None
        while True:
            if not self._somebody.is_set():
                cursor = None
                await self._somebody.wait()
            try:
                await self._look_at_keys()
                cursor = await self._look(cursor)
                await asyncio.sleep(POLL_SECONDS)
            except (DatabaseFault, BadSettings) as error:
                _log.warning("nobody hears of events: %s", error)
                cursor = None
                await asyncio.sleep(AWAY_SECONDS)

    async def _look_at_keys(self) -> None:
        """Wake all if a key was added, revoked or changed, or has expired. Raises BadSettings, DatabaseFault."""
        if self._keyring is None:
            return
        if self._keyring.is_stale:
            await asyncio.to_thread(self._keyring.refresh)
        if self._keyring.callers != self._callers:
            self._callers = self._keyring.callers
            self.wake(list(self._waiting))

    async def _look(self, cursor: int | None) -> int:
        """Wake those whose jobs had events after ``cursor``; without one, wake all, who may have missed some."""
        if cursor is None:
            last = await asyncio.to_thread(queries.last_event, self._database)
            self.wake(list(self._waiting))
            return last
        found = await asyncio.to_thread(queries.events_after, self._database, None, cursor)
        self.wake({event.job for event in found})
        return found[-1].id if found else cursor

    def wake(self, jobs: Iterable[str]) -> None:
        """Wake the requests that wait for these jobs."""
        for job in jobs:
            for changed in self._waiting.get(job, ()):
                changed.set()
