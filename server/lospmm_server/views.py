"""``View``: all that ``pages`` knows of database and store."""

from collections.abc import Sequence
from typing import Protocol

from fastapi import Request

from lospmm.artifact.artifact import Artifact
from lospmm_server.queries import JobRow
from lospmm_server.schemas import KernelQuery, ModelQuery
from lospmm_server.uploads import Received


class View(Protocol):
    """What pages need of the service; methods raise HTTPException 404, DatabaseFault and Busy."""

    async def jobs(
        self, request: Request, state: str | None, cursor: int | None
    ) -> tuple[Sequence[JobRow], int | None]:
        """Return a page of posted jobs, the newest first, of one ``state``, after ``cursor``; and the next cursor."""

    async def job(self, request: Request, job: str) -> JobRow:
        """Return a kernel's job, or a model's with its layers."""

    async def kernel(self, request: Request, digest: str) -> Artifact:
        """Return a finished kernel."""

    async def submit(self, request: Request, files: Received, query: KernelQuery) -> str:
        """Have a matrix tuned, as POST /v1/kernels does; return the id of the job."""

    async def submit_model(self, request: Request, files: Received, query: ModelQuery) -> str:
        """Have a model tuned, as POST /v1/models does; return the id of the job."""

    async def cancel(self, request: Request, job: str) -> None:
        """Cancel a job, as DELETE /v1/jobs/{id} does."""
