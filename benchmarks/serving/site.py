"""A service as users start it, with settings, keys and limits of its own, and requests beside an attack."""

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.serving import rate, wire
from lospmm.settings import settings
from tests.server.processes import serving

Record = dict[str, Any]
Result = TypeVar("Result")

#: Seconds between two sound requests, and after which one counts as unanswered.
PAUSE_SECONDS = 0.1
ANSWER_SECONDS = 30.0

#: ``lospmm serve`` that may open so many files: the first argument.
_LIMITED = """import resource, runpy, sys
files = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
runpy.run_module("lospmm.cli", run_name="__main__")"""


@dataclass(frozen=True, slots=True)
class Site:
    """A running service; ``keys`` by name, if it has any."""

    port: int
    process: int
    log: Path
    keys: Mapping[str, str]

    def request(self, line: str, content: bytes = b"", *headers: str, key: str = "") -> bytes:
        """A whole request, such as of the line ``GET /v1/jobs``, with the named key."""
        known = (f"Authorization: Bearer {self.keys[key]}",) if key else ()
        length = (f"Content-Length: {len(content)}",) if content else ()
        return wire.head(line, *known, *length, *headers) + content

    def unasked_bytes(self) -> int:
        """Bytes of the log, but for the lines of requests and the jobs of workers."""
        lines = self.log.read_bytes().splitlines()
        return sum(len(line) for line in lines if b'"event": "request"' not in line and b"job_id" not in line)


@contextmanager
def sampling(sample: Callable[[], object], seconds: float) -> Iterator[None]:
    """Call ``sample`` every so many seconds meanwhile, in a thread."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(seconds):
            sample()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def setting(**values: str) -> Iterator[Path]:
    """Settings of this process and those that it starts, a cache of their own, and a folder for logs."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="lospmm-service-") as directory:
        os.environ.update({"LOSPMM_CACHE_DIR": f"{directory}/cache", **values})
        settings.cache_clear()
        try:
            yield Path(directory)
        finally:
            os.environ.clear()
            os.environ.update(before)
            settings.cache_clear()


@contextmanager
def site(*, files: int = 1024, workers: int = 0, keys: tuple[str, ...] = (), **values: str) -> Iterator[Site]:
    """A service that may open so many files; with keys it listens on every address, where it wants one."""
    with setting(**values) as folder:
        add = (sys.executable, "-m", "lospmm.cli", "keys", "add")
        made = {name: subprocess.check_output((*add, name), text=True).split()[-1] for name in keys}
        arguments = ("serve", "--port", "0", "--workers", str(workers), *(("--host", "0.0.0.0") if keys else ()))
        with serving(folder, ("-c", _LIMITED, str(files), *arguments)) as (server, port):
            (log,) = folder.glob("serve-*.log")
            yield Site(port, server.pid, log, made)


async def beside(port: int, request: bytes, attack: Awaitable[Result]) -> tuple[Result, Record]:
    """The result of an attack, and how a sound request fared that was sent again and again meanwhile."""
    running = asyncio.ensure_future(attack)
    began, answers = time.monotonic(), []
    while not running.done():
        answers.append(await timed(port, request))
        await asyncio.sleep(PAUSE_SECONDS)
    return await running, figures(answers, time.monotonic() - began)


async def timed(port: int, request: bytes) -> tuple[int, float]:
    """The status, 0 for no answer, and the seconds of an answer."""
    began = time.monotonic()
    try:
        status = (await wire.send(port, request, seconds=ANSWER_SECONDS)).status
    except OSError:
        status = 0
    return status, time.monotonic() - began


def figures(answers: list[tuple[int, float]], seconds: float) -> Record:
    """Of sound requests."""
    found = rate.figures([delay for _, delay in answers], seconds)
    refused = Counter(status for status, _ in answers if status not in (200, 201))
    kept = {name: found[name] for name in ("p50_ms", "p99_ms", "longest_ms")}
    return {"sound_requests": len(answers), "sound_refused": refused.total(), **kept}
