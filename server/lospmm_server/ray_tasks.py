"""Code that runs on the nodes of a Ray cluster: tasks, and the actor that collects their progress."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lospmm.artifact import kept
from lospmm.gpu.detect import own_gpu
from lospmm.settings import settings
from lospmm.tuning import jobs
from lospmm.tuning.request import Request
from lospmm.tuning.session import Session
from lospmm.version import __version__
from lospmm_server.tuning import TuningProgress, check_digest

#: Least seconds between two reports of a task, except at the beginning and the end of a stage.
TELL_SECONDS = 0.2

Counts = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a node reports of itself."""

    version: str
    gpu: str


class Board:
    """An actor of the cluster: tasks write their progress by slot, and the worker process reads it."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[str, Counts]] = {}

    def tell(self, slot: str, job: str, progress: Counts) -> None:
        """Write the progress of a slot's job."""
        self._told[slot] = (job, progress)

    def read(self, slot: str) -> tuple[str, Counts]:
        """Return the job that wrote last, and its progress."""
        return self._told.get(slot, ("", {}))


def look() -> Seen:
    """Return this node's version and GPU; runs as a task."""
    return Seen(__version__, own_gpu() or "")


def tune_there(request: Request, job: str, slot: str, workers: int, board: Any = None) -> dict[str, bytes]:
    """Tune ``job`` on this node and return its artifact's files; runs as a task. Raises as ``jobs.tune``."""
    check_digest(request, job)
    report, told = TuningProgress(), 0.0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal told
        report(stage, done, total)
        now = time.monotonic()
        if board is None:
            return
        if now - told > TELL_SECONDS or (done, total) in ((0, 1), (1, 1)):
            told = now
            board.tell.remote(slot, job, report.progress)

    with Session(min(workers, settings().workers)) as session:
        return dict(jobs.tune(request, store=kept.open_store(), progress=progress, session=session).files)
