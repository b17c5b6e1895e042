"""The service as the pages see it (``views.View``)."""

from typing import Any

from fastapi import Request

from lospmm.artifact.artifact import Artifact
from lospmm_server import queries, queue
from lospmm_server.models import submit_model
from lospmm_server.queries import JobRow, LayerState
from lospmm_server.schemas import PAGE, KernelQuery, ModelQuery
from lospmm_server.service import Service
from lospmm_server.uploads import Received, read_request
from lospmm_server.views import JobListPage, JobPage, LayerPage


class ServiceView:
    """``views.View`` on a ``Service``."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def jobs(self, state: str | None, cursor: int | None) -> JobListPage:
        """Return a page of jobs."""
        found, following = await self._service.ask(queries.page_of_jobs, self._service.database, state, cursor, PAGE)
        return JobListPage(tuple(map(_job, found)), following)

    async def job(self, job: str) -> JobPage:
        """Return a job."""
        return _job(await self._service.job(job))

    async def kernel(self, digest: str) -> Artifact:
        """Return a finished kernel."""
        return (await self._service.kernel(digest)).artifact

    async def submit(self, request: Request, files: Received, query: KernelQuery) -> str:
        """Have a matrix tuned; return the id of the job."""
        service, key = self._service, request.state.key
        order = await service.take(lambda: service.order(read_request(files, query), key), files.size)
        service.metrics.artifact_requested(hit=order.is_kept)
        if not order.is_kept:
            await service.ask(queue.submit, service.database, order, key)
        return order.digest

    async def submit_model(self, request: Request, files: Received, query: ModelQuery) -> str:
        """Have a model tuned; return the id of the job."""
        return (await submit_model(self._service, files, query, request.state.key)).id

    async def cancel(self, job: str) -> None:
        """Cancel a job."""
        await self._service.ask(queue.cancel, self._service.database, job)


def _job(job: JobRow) -> JobPage:
    request: dict[str, Any] = dict(job.request)
    sizes = {name: request.get(name) for name in ("m", "k", "nnz", "n")}
    return JobPage(
        id=job.id,
        kind=job.kind,
        state=job.state,
        name=job.name,
        created=job.created,
        started=job.started,
        ended=job.ended,
        attempts=job.attempts,
        is_cancelling=job.is_cancelling,
        stage=job.stage,
        progress=job.progress,
        error=job.error,
        device=request.get("device", {}).get("name", ""),
        layers=tuple(map(_layer, job.layers)),
        **sizes,
    )


def _layer(layer: LayerState) -> LayerPage:
    return LayerPage(
        name=layer.name,
        n=layer.n,
        state=layer.state,
        skipped=layer.skipped,
        digest=layer.digest,
        stage=layer.stage,
        error=layer.error,
        m=layer.m,
        k=layer.k,
        nnz=layer.nnz,
        speedup=layer.speedup,
        estimated_micros=layer.estimated_micros,
    )
