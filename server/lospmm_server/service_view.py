"""The service as the pages see it (``views.View``)."""

from collections.abc import Sequence
from functools import partial

from fastapi import Request

from lospmm.artifact.artifact import Artifact
from lospmm_server import queries
from lospmm_server.models import read_model
from lospmm_server.queries import JobRow
from lospmm_server.schemas import PAGE, KernelQuery, ModelQuery
from lospmm_server.service import Service
from lospmm_server.uploads import Received, name_of, read_request


class ServiceView:
    """``views.View`` on a ``Service``."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def jobs(
        self, request: Request, state: str | None, cursor: int | None
    ) -> tuple[Sequence[JobRow], int | None]:
        """Return a page of jobs."""
        service, team = self._service, request.state.caller.sees
        return await service.ask(queries.page_of_jobs, service.database, state, cursor, PAGE, team)

    async def job(self, request: Request, job: str) -> JobRow:
        """Return a job."""
        return await self._service.job(job, request.state.caller)

    async def kernel(self, request: Request, digest: str) -> Artifact:
        """Return a finished kernel."""
        return (await self._service.kernel(digest, request.state.caller)).artifact

    async def submit(self, request: Request, files: Received, query: KernelQuery) -> str:
        """Have a matrix tuned; return the id of the job."""
        service, caller = self._service, request.state.caller
        order = await service.take(lambda: service.order(read_request(files, query), caller), files.size)
        await service.post(order, caller, name_of(files, query))
        return order.digest

    async def submit_model(self, request: Request, files: Received, query: ModelQuery) -> str:
        """Have a model tuned; return the id of the job."""
        caller = request.state.caller
        read = partial(read_model, files, query, team=caller.team)
        return (await self._service.post_model(read, files.size, caller)).id

    async def cancel(self, request: Request, job: str) -> None:
        """Cancel a job."""
        await self._service.cancel(job, request.state.caller)
