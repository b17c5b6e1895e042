"""The worker: takes a job from the queue, runs it, reports that it lives, and records the end.

The job runs in a thread, so that the worker can watch it meanwhile: a cancelled job is told to stop, and so is one
that takes too long or that another worker owns by now. An orderly end gives the job back. Another worker finds the
job of one that was killed (``leases.py``), and the store has the units that it had compiled.
"""

import logging
import threading
import time
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

from lospmm.artifact import kept
from lospmm.errors import BadRequest, DiskFault, LospmmError, NothingFits
from lospmm.settings import settings
from lospmm.store import Store
from lospmm_server import observations, queue, retention
from lospmm_server.database import Database
from lospmm_server.disk import Disk
from lospmm_server.faults import DatabaseFault, OutOfTime
from lospmm_server.leases import BEAT_SECONDS, GRACE_SECONDS, Lookout, new_name
from lospmm_server.logs import about_job
from lospmm_server.problems import describe
from lospmm_server.queue import Claim, JobVerdict
from lospmm_server.tuning import Died, Tune, TuningProgress

#: Seconds between two requests of an idle worker for a job, and between two checks of a running job.
POLL_SECONDS = 0.2
TICK_SECONDS = 0.3

#: Seconds that it waits for an unreachable database or a full disk: longer each time, up to the second figure.
BACKOFF_SECONDS = (0.5, 10.0)

#: Seconds between two removals of old jobs.
TIDY_SECONDS = 60.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RunningJob:
    """A job in its thread."""

    claim: Claim
    report: TuningProgress = field(default_factory=TuningProgress)
    cancel: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    outcome: "Future[queue.Json]" = field(default_factory=Future)
    is_late: bool = False
    told: float = field(default_factory=time.monotonic)  # when the last beat was
    shown: dict[str, tuple[int, int]] = field(default_factory=dict)  # the progress in the last beat


class Worker:
    """Takes one job after the other; ``gpu`` names its GPU in the device table; empty: none."""

    def __init__(self, database: Database, store: Store, tune: Tune, *, name: str = "", gpu: str = "") -> None:
        self.name = name or new_name()
        self._database, self._store, self._tune, self._gpu = database, store, tune, gpu
        self._disk, self._doubts_disk = Disk.under(store.root), False
        self._lookout = Lookout()
        self._tidied = time.monotonic()
        self._pause = 0.0

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop`` is set; a running job is then given back within GRACE_SECONDS."""
        while not stop.is_set():
            try:
                self._disk.check(by_writing=self._doubts_disk)
                self._doubts_disk = False
                claim = queue.claim(self._database, self.name, self._gpu)
                if claim is None:
                    self._look_after_others()
                self._pause = 0.0
            except (DatabaseFault, DiskFault) as error:
                self._wait(error, stop)
                continue
            if claim is None:
                stop.wait(POLL_SECONDS)
            else:
                with about_job(claim.digest):
                    self._work(RunningJob(claim), stop)

    def _look_after_others(self) -> None:
        for digest in self._lookout.release_expired(self._database):
            _log.warning("the worker of job %s has died; the job is queued again or given up", digest)
        if time.monotonic() - self._tidied > TIDY_SECONDS:
            self._tidied = time.monotonic()
            retention.forget(self._database)

    def _work(self, work: RunningJob, stop: threading.Event) -> None:
        digest, deadline = work.claim.digest, time.monotonic() + settings().job_seconds
        _log.info("the job begins, attempt %d", work.claim.attempts)
        threading.Thread(target=self._run, args=(work,), name=f"tune-{digest[:8]}", daemon=True).start()
        while not work.done.wait(TICK_SECONDS):
            if stop.is_set():
                work.cancel.set()
                work.done.wait(GRACE_SECONDS)
                break
            if time.monotonic() > deadline and not work.cancel.is_set():
                work.is_late = True
                work.cancel.set()
            if self._look(work) is not JobVerdict.GO_ON:
                work.cancel.set()
        self._write_down(work, stop)

    def _run(self, work: RunningJob) -> None:
        """Run the job in a thread of its own; the outcome is the data of the event, or what was raised."""
        with about_job(work.claim.digest):
            self._try(work)

    def _try(self, work: RunningJob) -> None:
        try:
            is_kept = kept.find(work.claim.digest, self._store) is not None
            artifact = self._tune(work.claim, work.report, work.cancel)
            found = observations.succeeded(artifact, cache="hit" if is_kept else "miss", model=work.claim.model)
            work.outcome.set_result(found)
        except BaseException as error:
            work.outcome.set_exception(error)
        finally:
            work.done.set()

    def _look(self, work: RunningJob) -> JobVerdict:
        """Write a beat if it is due or there is progress; return the row's verdict on the job."""
        progress, now = work.report.progress, time.monotonic()
        try:
            if progress == work.shown and now - work.told < BEAT_SECONDS:
                return queue.look(self._database, work.claim)
            verdict = queue.beat(self._database, work.claim, work.report.stage, progress)
            work.told, work.shown = now, progress
            return verdict
        except DatabaseFault as error:
            _log.warning("the job goes on without the database: %s", error)
            return JobVerdict.GO_ON

    def _write_down(self, work: RunningJob, stop: threading.Event) -> None:
        """Record the end of the job, however long the database is away; else the job would be run again."""
        while True:
            try:
                self._end(work, stop)
                self._pause = 0.0
                return
            except DatabaseFault as error:
                if stop.is_set():
                    return
                self._wait(error, stop)

    def _end(self, work: RunningJob, stop: threading.Event) -> None:
        claim = work.claim
        if not work.done.is_set():  # it did not stop in time
            queue.give_back(self._database, claim)
            return
        error = work.outcome.exception()
        if error is None:
            queue.beat(self._database, claim, work.report.stage, work.report.progress)
            is_ours = queue.finish(self._database, claim, work.outcome.result())
            _log.info("the job has succeeded%s", "" if is_ours else ", and has another owner by now")
        elif isinstance(error, Died):
            queue.release_all_of(self._database, self.name)  # it has no other job
        elif isinstance(error, CancelledError) and work.is_late and not stop.is_set():
            late = OutOfTime(f"the job took more than the {settings().job_seconds:g} s of LOSPMM_JOB_SECONDS")
            queue.fail(self._database, claim, describe(late))
        elif isinstance(error, CancelledError) or stop.is_set():
            queue.give_back(self._database, claim)  # cancelled there, if that was asked for
        elif not isinstance(error, (BadRequest, NothingFits)) and (lacks := self._disk.lacks()):
            self._doubts_disk = True
            queue.give_back(self._database, claim)
            _log.warning("the job waits for the disk: %s", "; ".join(lacks))
        elif isinstance(error, DiskFault):  # well by now: another filled it, or this job did
            queue.put_back(self._database, claim, describe(error))
            _log.warning("the job is queued again, or given up: %s", error)
        else:
            if not isinstance(error, LospmmError):
                _log.error("the job failed unexpectedly", exc_info=error)
            queue.fail(self._database, claim, describe(error))
            _log.info("the job has failed: %s", error)

    def _wait(self, error: LospmmError, stop: threading.Event) -> None:
        shortest, longest = BACKOFF_SECONDS
        self._pause = min(longest, max(shortest, 2 * self._pause))
        _log.warning("%s; next try in %.1f s", error, self._pause)
        stop.wait(self._pause)
