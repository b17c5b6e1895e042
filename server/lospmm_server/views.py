"""Data that pages show of jobs; ``View`` is all that ``pages`` knows of database and store."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, Protocol

from fastapi import Request

from lospmm.artifact.artifact import Artifact
from lospmm_server.schemas import KernelQuery, ModelQuery, Problem
from lospmm_server.uploads import Received

PENDING = ("queued", "running")
STATES = (*PENDING, "succeeded", "partial", "failed", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPage:
    """A layer of a model; an unreadable one has no digest and no sizes, but a problem in ``error``."""

    name: str
    state: str
    n: int | None = None
    digest: str | None = None
    stage: str | None = None
    error: Problem | None = None
    m: int | None = None
    k: int | None = None
    nnz: int | None = None
    speedup: float | None = None  # over dense cuBLAS in fp32, where both were timed
    estimated_micros: float | None = None  # forecast of one launch of its kernel
    skipped: str | None = None  # why no kernel was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """The job of a kernel or of a model, whose ``layers`` may be left out in lists."""

    id: str
    kind: Literal["kernel", "model"]
    state: str
    name: str = ""  # a model's
    created: datetime | None = None
    started: datetime | None = None
    ended: datetime | None = None
    attempts: int = 0
    is_cancelling: bool = False
    stage: str | None = None  # that reported last
    progress: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # (done, total) by stage; a model's by layers
    error: Problem | None = None
    m: int | None = None
    k: int | None = None
    nnz: int | None = None
    n: int | None = None
    device: str = ""
    layers: tuple[LayerPage, ...] = ()

    @property
    def is_pending(self) -> bool:
        """Whether it waits or runs."""
        return self.state in PENDING

    @property
    def title(self) -> str:
        """Title of its page."""
        return f"Model {self.name}" if self.kind == "model" else f"Kernel {self.id[:12]}"

    @property
    def seconds(self) -> float | None:
        """Seconds from its start to its end."""
        if self.started is None or self.ended is None:
            return None
        return max(0.0, (self.ended - self.started).total_seconds())

    @property
    def fraction(self) -> tuple[int, int] | None:
        """(done, total) of the layers of a model, or of the stage of a kernel that reported last."""
        return self.progress.get("layers" if self.kind == "model" else self.stage or "")


@dataclass(frozen=True, slots=True)
class JobListPage:
    """A page of the list; ``following`` is the cursor of the next page; None on the last."""

    jobs: tuple[JobPage, ...]
    following: int | None


class View(Protocol):
    """What pages need of the service; methods raise HTTPException 404, DatabaseFault and Busy."""

    async def jobs(self, request: Request, state: str | None, cursor: int | None) -> JobListPage:
        """Return a page of posted jobs, the newest first, of one ``state``, after ``cursor``."""

    async def job(self, request: Request, job: str) -> JobPage:
        """Return a kernel's job, or a model's with its layers."""

    async def kernel(self, request: Request, digest: str) -> Artifact:
        """Return a finished kernel."""

    async def submit(self, request: Request, files: Received, query: KernelQuery) -> str:
        """Have a matrix tuned, as POST /v1/kernels does; return the id of the job."""

    async def submit_model(self, request: Request, files: Received, query: ModelQuery) -> str:
        """Have a model tuned, as POST /v1/models does; return the id of the job."""

    async def cancel(self, request: Request, job: str) -> None:
        """Cancel a job, as DELETE /v1/jobs/{id} does."""
