"""Workers beside a server that cannot be started for a while."""

import asyncio
import threading
from typing import Any

import pytest

from lospmm_server import beside
from lospmm_server.beside import LocalWorkers
from lospmm_server.database import Database


class Tight:
    """A machine with room for no more processes, nor for threads."""

    def __init__(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_tight, self.asked, self.started = True, 0, 0
        start, begin = threading.Thread.start, asyncio.create_subprocess_exec

        def thread(own: threading.Thread) -> None:
            if self.is_tight:
                raise RuntimeError("can't start new thread")
            start(own)

        async def process(*_: Any, **named: Any) -> Any:
            self.asked += 1
            if self.is_tight:
                raise error
            self.started += 1
            return await begin("sleep", "60", **named)

        monkeypatch.setattr(threading.Thread, "start", thread)
        monkeypatch.setattr(asyncio, "create_subprocess_exec", process)


@pytest.mark.parametrize(
    "error", [BlockingIOError(11, "Resource temporarily unavailable"), RuntimeError("can't start new thread")]
)
def test_a_worker_is_started_once_there_is_room(
    error: Exception, either_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "LONGEST_PAUSE_SECONDS", 0.05)

    async def kept() -> None:
        tight, crew = Tight(error, monkeypatch), LocalWorkers(either_database, 1)
        running = asyncio.create_task(crew.run())
        while tight.asked < 3:
            assert not running.done()
            await asyncio.sleep(0.02)
        tight.is_tight = False
        while not tight.started:
            assert not running.done()
            await asyncio.sleep(0.02)
        await crew.close()
        await running

    asyncio.run(asyncio.wait_for(kept(), 20))
