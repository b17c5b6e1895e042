"""One tuning as its clients see it, from the moment when it is accepted."""

import asyncio
from contextlib import suppress

from lospmm.artifact import Artifact
from lospmm_server.schemas import JobState, Problem


class Job:
    """Belongs to the event loop, except for ``start`` and ``report``, which the thread that tunes calls.

    It keeps neither the matrix nor a traceback, since failures are remembered.
    """

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.stage: str | None = None
        self.artifact: Artifact | None = None
        self.error: Problem | None = None
        self._started = False
        self._progress: dict[str, tuple[int, int]] = {}
        self._ended = asyncio.Event()

    @classmethod
    def finished(cls, digest: str, artifact: Artifact) -> "Job":
        job = cls(digest)
        job.end(artifact)
        return job

    @property
    def state(self) -> JobState:
        if self.artifact is not None:
            return JobState.SUCCEEDED
        if self.error is not None:
            return JobState.FAILED
        return JobState.RUNNING if self._started else JobState.QUEUED

    @property
    def progress(self) -> dict[str, tuple[int, int]]:
        """(done, total) of each stage so far."""
        return self._progress.copy()

    def start(self) -> None:
        self._started = True

    def report(self, stage: str, done: int, total: int) -> None:
        """A ``Progress``. A stage says 0 of 1 before it knows how many parts it has, and 1 of 1 at its end."""
        known = max(total, self._progress.get(stage, (0, 1))[1])
        self._progress[stage] = (known if (done, total) == (1, 1) else done, known)
        self.stage = stage

    def end(self, outcome: Artifact | Problem) -> None:
        """The first outcome counts."""
        if self._ended.is_set():
            return
        if isinstance(outcome, Problem):
            self.error = outcome
        else:
            self.artifact = outcome
        self._ended.set()

    async def wait(self, seconds: float) -> None:
        """Return when the job has ended, or after so long."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)
