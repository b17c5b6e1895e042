"""Workers on the server's machine: ``lospmm worker`` as child processes, restarted when they die.

The server knows at once that a child has ended, and releases its job without waiting for the lease. A server that is
killed leaves its workers: each watches its parent, and gives its job back when the parent is gone.
"""

import asyncio
import logging
import os
import sys
import time
from contextlib import suppress

from lospmm_server import queue
from lospmm_server.database import Database
from lospmm_server.faults import DatabaseFault
from lospmm_server.leases import GRACE_SECONDS, new_name

#: A worker that dies sooner than this is restarted with a growing delay, up to the second figure, in seconds.
YOUNG_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 10.0

#: Seconds that an orderly end may take beyond the worker's own grace.
ENDING_SECONDS = 2.0

_log = logging.getLogger(__name__)


class LocalWorkers:
    """``count`` worker processes, kept alive by the task that runs ``run``."""

    def __init__(self, database: Database, count: int) -> None:
        self._database, self._count = database, count
        self._running: set[asyncio.subprocess.Process] = set()
        self._is_stopping = False

    async def run(self) -> None:
        """Keep the workers alive until this task is cancelled."""
        await asyncio.gather(*(self._keep_one() for _ in range(self._count)))

    def stop(self) -> None:
        """Tell the workers to give their jobs back and to exit."""
        self._is_stopping = True
        for process in self._running:
            with suppress(ProcessLookupError):
                process.terminate()

    async def close(self) -> None:
        """Do as ``stop``, wait for the workers to exit, and kill those that do not."""
        self.stop()
        running = list(self._running)
        if not running:
            return
        ended = [asyncio.create_task(process.wait()) for process in running]
        await asyncio.wait(ended, timeout=GRACE_SECONDS + ENDING_SECONDS)
        for process in running:
            with suppress(ProcessLookupError):
                process.kill()
        await asyncio.wait(ended)

    async def _keep_one(self) -> None:
        pause = 0.0
        while not self._is_stopping:
            started = time.monotonic()
            name = new_name()
            try:
                end = f"has ended with status {await self._one_life(name)}"
            except (OSError, RuntimeError) as error:  # no memory, files or threads left, perhaps for a while
                end = f"cannot be started: {error}"
            if self._is_stopping:
                return
            with suppress(DatabaseFault, RuntimeError):  # else another worker finds its job
                await asyncio.to_thread(queue.release_all_of, self._database, name)
            is_young = time.monotonic() - started < YOUNG_SECONDS
            pause = min(LONGEST_PAUSE_SECONDS, 2 * pause + 0.5) if is_young else 0.0
            _log.warning("the worker %s %s; another starts in %.1f s", name, end, pause)
            await asyncio.sleep(pause)

    async def _one_life(self, name: str) -> int:
        command = (sys.executable, "-m", "lospmm.cli", "worker", "--name", name, "--parent", str(os.getpid()))
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
        self._running.add(process)
        if self._is_stopping:
            process.terminate()
        try:
            return await process.wait()
        finally:
            self._running.discard(process)
