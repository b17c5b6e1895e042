"""Where uploads are read and kernels tuned: two small pools of threads and the jobs that are under way.

Jobs live in the memory of one process. Their results live in the store, so a job that succeeded is forgotten and found
there again, and one that was lost with the process is posted again and builds on the units compiled so far.
"""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from fastapi import HTTPException

from lospmm import jobs
from lospmm.artifact import Artifact
from lospmm.errors import LospmmError
from lospmm.store import Store
from lospmm_server.job import Job
from lospmm_server.problems import describe

#: Uploads that are in memory at the same time.
READERS = 2

#: Failures that are remembered, the newest.
FAILURES_KEPT = 100

#: What a client is told to wait before it asks again, in seconds.
RETRY_SECONDS = 2

#: How long an orderly end waits for a job that has been told to stop: some stages cannot be interrupted.
GRACE_SECONDS = 3.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Order:
    """A request to tune, its digest, and its artifact where the store has one."""

    digest: str
    request: jobs.Request
    kept: Artifact | None


class Workshop:
    """Belongs to the event loop. ``parallel`` jobs are tuned at a time and ``max_waiting`` may wait for them.

    Compilers of one job already use every core, hence one at a time.
    """

    def __init__(self, store: Store, *, parallel: int = 1, max_waiting: int = 16) -> None:
        self.store = store
        self._capacity = parallel + max_waiting
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="read")
        self._tuners = ThreadPoolExecutor(parallel, thread_name_prefix="tune")
        self._stop = threading.Event()
        self._active: dict[str, Job] = {}
        self._work: set[asyncio.Future[Artifact]] = set()
        self._failed: OrderedDict[str, Job] = OrderedDict()

    async def take(self, read: Callable[[], jobs.Request]) -> Order:
        """``read`` the request in a thread and look for its artifact. Raises what ``read`` does."""
        self._refuse_when_stopping()
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._order, read)

    def submit(self, order: Order) -> Job:
        """The job of an order: a finished one, the one under way, or a new one. Raises HTTPException 429 and 503."""
        self._refuse_when_stopping()
        if order.kept is not None:
            return Job.finished(order.digest, order.kept)
        if (underway := self._active.get(order.digest)) is not None:
            return underway
        if len(self._active) >= self._capacity:
            message = f"{len(self._active)} jobs are under way, as many as this service takes; try again later"
            raise HTTPException(429, message, {"Retry-After": str(RETRY_SECONDS)})
        job = Job(order.digest)
        self._failed.pop(job.digest, None)
        self._active[job.digest] = job
        work = asyncio.get_running_loop().run_in_executor(self._tuners, self._tune, job, order.request)
        self._work.add(work)
        work.add_done_callback(partial(self._ended, job))
        return job

    async def find_job(self, digest: str) -> Job:
        """The job of that digest, under way or ended. Raises HTTPException 404."""
        if (known := self._active.get(digest) or self._failed.get(digest)) is not None:
            return known
        return Job.finished(digest, await asyncio.to_thread(self.kernel, digest))

    def kernel(self, digest: str) -> Artifact:
        """A finished kernel from the store, from any thread. Raises HTTPException 404."""
        found = jobs.find(digest, self.store)
        if found is None:
            raise HTTPException(404, f"{digest}: no kernel and no job of this digest; post its matrix (again)")
        return found

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Tell every job to stop and everybody who waits for one."""
        self._stop.set()
        self._readers.shutdown(wait=False)  # what they have begun is told in ``submit``
        self._tuners.shutdown(wait=False, cancel_futures=True)
        for job in self._active.values():
            job.end(describe(_stopping()))

    async def close(self) -> None:
        """``stop``, and let the compilers end."""
        self.stop()
        if self._work:
            await asyncio.wait(self._work, timeout=GRACE_SECONDS)

    def _order(self, read: Callable[[], jobs.Request]) -> Order:
        request = read()
        digest = request.digest
        return Order(digest, request, jobs.find(digest, self.store))

    def _tune(self, job: Job, request: jobs.Request) -> Artifact:
        job.start()
        return jobs.tune(request, store=self.store, progress=job.report, cancel=self._stop)

    def _ended(self, job: Job, work: asyncio.Future[Artifact]) -> None:
        self._work.discard(work)
        del self._active[job.digest]
        if work.cancelled():  # it never began
            return
        error = work.exception()  # asked for in any case, or the event loop complains
        if self._stop.is_set():
            return
        if error is None:
            job.end(work.result())
            return
        if not isinstance(error, LospmmError):
            _log.error("the job %s failed unexpectedly", job.digest, exc_info=error)
        job.end(describe(error))
        self._failed[job.digest] = job
        while len(self._failed) > FAILURES_KEPT:
            self._failed.popitem(last=False)

    def _refuse_when_stopping(self) -> None:
        if self._stop.is_set():
            raise _stopping()


def _stopping() -> HTTPException:
    return HTTPException(503, "the service is stopping; post the matrix again later", {"Retry-After": "10"})
