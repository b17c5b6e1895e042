"""What a long piece of work tells those who wait for it, and the seconds that each of its stages took."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager

#: Told (stage, done, total); a stage without countable parts reports 0 of 1, then 1 of 1.
Progress = Callable[[str, int, int], None]

#: Told (done, total) of the parts of one stage.
Count = Callable[[int, int], None]

#: The stages of tuning one matrix, as they stand in the manifest.
STAGES = (
    "reorder", "constraints", "rank", "compile_trials", "measure_trials", "emit", "compile", "verify", "compare"
)  # fmt: skip


def silent(_stage: str, _done: int, _total: int) -> None:
    """Progress that nobody watches."""


def uncounted(_done: int, _total: int) -> None:
    """Parts that nobody counts."""


class Stages:
    """Times the stages of one job, reports them and stops between two of them when the job is cancelled."""

    def __init__(self, progress: Progress = silent, cancel: threading.Event | None = None) -> None:
        self.progress = progress
        self.cancel = cancel
        self._started = time.monotonic()
        self._seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of the block as the stage's own, and not as that of a stage around it."""
        self.progress(name, 0, 1)
        with self.part(name):
            yield
        self.progress(name, 1, 1)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The same for one of many parts of a stage, whose progress the caller reports. Raises CancelledError."""
        if self.cancel is not None and self.cancel.is_set():
            raise CancelledError
        others = sum(self._seconds.values())
        started = time.monotonic()
        yield
        inner = sum(self._seconds.values()) - others
        self._seconds[name] += time.monotonic() - started - inner

    def seconds(self) -> dict[str, float]:
        """Seconds by stage, and in ``total`` since the job began."""
        return {"total": time.monotonic() - self._started, **self._seconds}
