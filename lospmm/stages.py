"""Progress callbacks, and the seconds that each stage of a job took."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager

#: Called with (stage, done, total); a stage without countable parts reports 0 of 1, then 1 of 1.
Progress = Callable[[str, int, int], None]

#: Called with (done, total) parts of one stage.
Count = Callable[[int, int], None]

#: The stages of tuning one matrix, as they stand in the manifest.
STAGES = (
    "reorder", "constraints", "rank", "compile_trials", "measure_trials", "emit", "compile", "verify", "compare"
)  # fmt: skip


def silent(*_: object) -> None:
    """Ignore the progress of a job, or of one of its stages."""


class Stages:
    """Timer of the stages of one job: reports progress, and stops between stages if the job is cancelled."""

    def __init__(self, progress: Progress = silent, cancel: threading.Event | None = None) -> None:
        self.progress = progress
        self.cancel = cancel
        self._started = time.monotonic()
        self._seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to this stage alone, not to the stage around it. Raises CancelledError."""
        self.progress(name, 0, 1)
        with self.part(name):
            yield
        self.progress(name, 1, 1)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time one of many parts of a stage, whose progress the caller reports. Raises CancelledError."""
        if self.cancel is not None and self.cancel.is_set():
            raise CancelledError
        others = sum(self._seconds.values())
        started = time.monotonic()
        yield
        inner = sum(self._seconds.values()) - others
        self._seconds[name] += time.monotonic() - started - inner

    def count(self, name: str) -> Count:
        """Return a callback that reports finished parts of a stage. It raises CancelledError."""

        def report(done: int, total: int) -> None:
            with self.part(name):
                self.progress(name, done, total)

        return report

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage, and under ``total`` those since the job began."""
        return {"total": time.monotonic() - self._started, **self._seconds}
