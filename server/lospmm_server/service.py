"""The service behind the routes: the tables, the store, and the requests that wait for jobs.

It takes requests and gives answers; workers do the work, in other processes (``worker.py``). An accepted job is a
committed row whose matrix is in the store: neither depends on this process any more.
"""

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Annotated, TypeVar, cast

from fastapi import Depends, HTTPException
from starlette.requests import HTTPConnection

from lospmm.store import Store
from lospmm.tuning.request import Request
from lospmm_server import queries, queue
from lospmm_server.beside import LocalWorkers
from lospmm_server.database import Database
from lospmm_server.events import Watch
from lospmm_server.faults import DatabaseFault, Stopping
from lospmm_server.keys import Caller, Keyring, refused
from lospmm_server.memory import forget_frames
from lospmm_server.metrics import Metrics
from lospmm_server.queries import JobRow
from lospmm_server.queue import KernelOrder, ModelOrder
from lospmm_server.queued_request import keep_matrix, to_json
from lospmm_server.schemas import JobState
from lospmm_server.shelf import Shelf, ShelvedKernel

#: Bodies that are parsed at the same time: of the large, one may take 300 MB (benchmarks/serving/large.py) and seconds.
LARGE_READERS, SMALL_READERS = 1, 2

#: Bytes of a small body.
SMALL_BYTES = 4 << 20

#: Transactions at the same time; writers wait for each other anyway.
TRANSACTIONS = 4

#: What teams are known to have posted: they find it without the database, also while that is away.
POSTED_KNOWN = 10_000

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Service:
    """The service of one event loop; without ``keyring`` everybody may call; ``workers`` run beside it."""

    def __init__(self, database: Database, store: Store, *, keyring: Keyring | None = None, workers: int = 0) -> None:
        self.database, self.store, self.keyring = database, store, keyring
        self.shelf = Shelf(store)
        self.metrics = Metrics()
        self.watch = Watch(database, keyring)
        self.crew = LocalWorkers(database, workers)
        self._large_readers = ThreadPoolExecutor(LARGE_READERS, thread_name_prefix="read")
        self._small_readers = ThreadPoolExecutor(SMALL_READERS, thread_name_prefix="read-small")
        self._clerks = ThreadPoolExecutor(TRANSACTIONS, thread_name_prefix="database")
        self._posted: set[tuple[str, str]] = set()  # teams and ids
        self._counted: int | None = None  # the last event counted by the metrics
        self._counting = asyncio.Lock()

    @asynccontextmanager
    async def life(self) -> AsyncIterator[None]:
        """Run the tasks that wake waiting requests and keep the workers beside alive."""
        with suppress(DatabaseFault):
            self._counted = await self.ask(queries.last_event, self.database)
        tasks = [asyncio.create_task(self.watch.run()), asyncio.create_task(self.crew.run())]
        try:
            yield
        finally:
            self.stop()
            await self.crew.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.database.close()

    @property
    def is_stopping(self) -> bool:
        """Whether the service is about to end."""
        return self.watch.is_stopping

    def admits(self, caller: Caller) -> bool:
        """Return whether a caller who was let in still would be: the key may have been revoked, or has expired."""
        return self.keyring is None or self.keyring.knows(caller)

    def stop(self) -> None:
        """Answer the waiting requests, and have the workers give their jobs back."""
        self.watch.stop()
        self.crew.stop()
        self._large_readers.shutdown(wait=False)
        self._small_readers.shutdown(wait=False)

    async def ask(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a function of ``queue`` or ``queries`` in a thread."""
        return await self._in(self._clerks, partial(function, *arguments))

    async def take(self, read: Callable[[], Result], size: int) -> Result:
        """Call ``read`` on a body of ``size`` bytes in a thread, with few others at a time; small ones pass large ones.

        Raises what it does, and Stopping.
        """
        if self.is_stopping:
            raise Stopping
        readers = self._small_readers if size <= SMALL_BYTES else self._large_readers
        return await self._in(readers, lambda: _forgetful(read))

    async def check_quota(self, key: str) -> None:
        """Raise Busy where not even one new job of this key would be taken."""
        await self.ask(queue.check_room, self.database, key, [""])

    def order(self, request: Request, caller: Caller, staged: Store | None = None) -> KernelOrder:
        """Return the order of a settled request, and store its matrix if it must be tuned; thread-safe.

        The matrix goes to ``staged`` if given, as long as the rest of a model is not yet accepted. Raises Busy before
        anything is written, DiskFault.
        """
        digest, options = request.digest, request.options
        kept = self.shelf.at_hand(digest) or self.shelf.find(digest)
        if kept is None:
            self.shelf.disk.check()
            queue.check_room(self.database, caller.name, [digest])
            keep_matrix(request.problem.matrix, self.store, staged)
        gpu = request.problem.device.name if "gpu" in (options.measure, options.verify) else ""
        estimated = None if kept is None else kept.artifact.manifest["search"]["estimated_micros"]
        return KernelOrder(digest, to_json(request), gpu, kept is not None, estimated)

    def order_all(self, read: Callable[[Callable[[Request], KernelOrder]], ModelOrder], caller: Caller) -> ModelOrder:
        """Return the model that ``read`` makes of its layers' orders; a refused model stores nothing."""
        with self.store.staging() as staged:
            model = read(lambda request: self.order(request, caller, staged))
            queue.check_room(self.database, caller.name, model.new)
            self.store.adopt(staged)
        return model

    async def post_model(
        self, read: Callable[[Callable[[Request], KernelOrder]], ModelOrder], size: int, caller: Caller
    ) -> ModelOrder:
        """Queue the layers of the model that ``read`` makes. Raises what it does, Busy, and HTTPException 503."""
        model = await self.take(lambda: self.order_all(read, caller), size)
        for layer in model.layers:
            if layer.order is not None:
                self.metrics.artifact_requested(hit=layer.order.is_kept)
        await self.ask(queue.submit_model, self.database, model, caller)
        return model

    async def post(self, order: KernelOrder, caller: Caller, name: str) -> None:
        """Queue an order by a file's name; one that is kept is noted as posted by the caller's team. Raises Busy."""
        self.metrics.artifact_requested(hit=order.is_kept)
        if caller.team or not order.is_kept:
            await self.ask(queue.submit, self.database, order, caller, name)

    async def find(self, digest: str) -> ShelvedKernel | None:
        """Return a finished kernel, or None. Raises DiskFault."""
        return self.shelf.at_hand(digest) or await asyncio.to_thread(self.shelf.find, digest)

    async def kernel(self, digest: str, caller: Caller) -> ShelvedKernel:
        """Return a finished kernel. Raises HTTPException 404, where one that was lost is tuned again; DiskFault."""
        may_see = await self._may_see(digest, caller)
        found = await self.find(digest) if may_see else None
        if found is None:
            lost = may_see and await self.ask(queue.requeue, self.database, digest)
            why = "its files were damaged or removed; it is tuned again" if lost else "post its matrix (again)"
            raise HTTPException(404, f"{digest}: no kernel of this digest; {why}")
        return found

    async def job(self, job_id: str, caller: Caller) -> JobRow:
        """Return a job as it is now. Raises HTTPException 404, DiskFault."""
        job = await self.ask(queries.find_job, self.database, job_id, caller.sees)
        if job is not None and (job.kind == "model" or job.state != JobState.SUCCEEDED):
            return job
        kept = await self.find(job_id) if job is not None or await self._may_see(job_id, caller) else None
        if kept is not None:
            return job or JobRow(id=job_id, kind="kernel", state=JobState.SUCCEEDED)
        if job is not None:
            await self.ask(queue.requeue, self.database, job_id)
            job = await self.ask(queries.find_job, self.database, job_id, caller.sees)
        if job is None:
            raise HTTPException(404, f"{job_id}: no job of this id; post its matrix (again)")
        return job

    async def cancel(self, job_id: str, caller: Caller) -> JobRow:
        """Cancel a job, and return it. Raises HTTPException 404, DiskFault."""
        await self.ask(queue.cancel, self.database, job_id, caller.sees)
        self.watch.wake([job_id])  # no event says that it goes on for others alone
        return await self.job(job_id, caller)

    async def _may_see(self, job_id: str, caller: Caller) -> bool:
        if caller.sees is None or (caller.sees, job_id) in self._posted:
            return True
        if not await self.ask(queries.is_of_team, self.database, job_id, caller.sees):
            return False
        if len(self._posted) >= POSTED_KNOWN:
            self._posted.clear()
        self._posted.add((caller.sees, job_id))  # and stays so
        return True

    async def wait_for(self, job_id: str, seconds: float, caller: Caller) -> JobRow:
        """Return the job once it has ended, the time is up, or the service stops.

        Raises HTTPException 404, and 401 once the caller's key is no longer valid.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        job = await self.job(job_id, caller)
        if job.is_ended or seconds <= 0:
            return job
        with self.watch.subscribed(job.watched) as changed:
            while True:
                changed.clear()
                if not self.admits(caller):
                    raise refused()
                job = await self.job(job_id, caller)
                remaining = deadline - loop.time()
                if job.is_ended or self.is_stopping or remaining <= 0:
                    return job
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), remaining)

    async def render_metrics(self) -> bytes:
        """Return the metrics, including what workers have recorded since the last call.

        Without the database, the queue's are NaN and the others are unchanged: the process is seen to live.
        """
        async with self._counting:
            try:
                await self._count()
                return self.metrics.render(await self.ask(queries.figures, self.database))
            except DatabaseFault as error:
                _log.warning("figures without the queue: %s", error)
                return self.metrics.render(None)

    async def _count(self) -> None:
        """Count the events since the last call. Raises DatabaseFault."""
        if self._counted is None:
            self._counted = await self.ask(queries.last_event, self.database)
        while found := await self.ask(queries.events_after, self.database, None, self._counted):
            for event in found:
                self.metrics.observe(event.kind, event.data)
            self._counted = found[-1].id

    async def _in(self, pool: ThreadPoolExecutor, function: Callable[[], Result]) -> Result:
        """Call a function in a thread whose log lines have the request's id."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(pool, lambda: context.run(function))


def _forgetful(read: Callable[[], Result]) -> Result:
    """Call ``read``; if it raises, its frames are cleared so that no upload stays in memory."""
    try:
        return read()
    except Exception as error:
        forget_frames(error)
        raise


async def _service_of(connection: HTTPConnection) -> Service:
    return cast(Service, connection.app.state.service)


#: The service, as a parameter of a route.
Behind = Annotated[Service, Depends(_service_of)]
