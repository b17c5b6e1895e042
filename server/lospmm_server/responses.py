"""Kernels, their files and jobs as HTTP answers."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from lospmm.artifact.artifact import BIAS_FILE, MATRIX_FILE, SOURCE_FILES, SPACE_FILE, TUNING_FILE, Artifact
from lospmm_server.faults import RETRY_SECONDS
from lospmm_server.problems import problem_response
from lospmm_server.queries import JobRow, LayerState
from lospmm_server.schemas import (
    JobLinks,
    JobList,
    JobState,
    JobView,
    KernelLinks,
    LayerView,
    StageProgress,
)

JSON = "application/json"
BINARY = "application/octet-stream"
ZIP = "application/zip"

#: A kernel's files are determined by its digest: they can be cached forever.
CACHE_CONTROL = "max-age=31536000, immutable"


def kernel_url(digest: str) -> str:
    """Return the URL of a kernel."""
    return f"/v1/kernels/{digest}"


def job_url(digest: str) -> str:
    """Return the URL of a job."""
    return f"/v1/jobs/{digest}"


@dataclass(frozen=True)
class File:
    """A file of a kernel as it is sent."""

    content: bytes
    media_type: str
    name: str | None = None  # under which a browser saves it

    @cached_property
    def etag(self) -> str:
        """Entity tag: the sha256 of the content."""
        return f'"{hashlib.sha256(self.content).hexdigest()}"'

    @cached_property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {"ETag": self.etag, "Cache-Control": CACHE_CONTROL, **self.disposition}

    @property
    def disposition(self) -> dict[str, str]:
        """Header with the name to save the file under, if it has one."""
        return {"Content-Disposition": f'attachment; filename="{self.name}"'} if self.name else {}


#: Parts of a kernel that have a URL.
Part = Literal["manifest", "cubin", "source", "tuning", "matrix", "space", "bias"]
Files = Mapping[Part, File]


#: Files that artifacts of earlier versions lack, or any without a bias; how they are sent, and how their names end.
_LATER: Mapping[Part, tuple[str, str, str | None]] = {
    "matrix": (MATRIX_FILE, BINARY, ".npz"),
    "space": (SPACE_FILE, JSON, None),
    "bias": (BIAS_FILE, BINARY, "_bias.npy"),
}


def files_of(digest: str, artifact: Artifact) -> Files:
    """Return the files of a kernel as they are sent."""
    manifest, held = artifact.manifest, artifact.files
    later: dict[Part, File] = {
        part: File(held[name], media_type, None if end is None else f"{manifest['name']}{end}")
        for part, (name, media_type, end) in _LATER.items()
        if name in held
    }
    return {
        **later,
        "manifest": File(_kernel_json(digest, artifact), JSON),
        "cubin": File(artifact.cubin, BINARY, f"{manifest['name']}.cubin"),
        "source": File(artifact.source, "text/plain", SOURCE_FILES[manifest["emitter"]]),
        "tuning": File(held[TUNING_FILE], "application/x-ndjson"),
    }


def immutable(request: Request, file: File) -> Response:
    """Return content that never changes: 200, or 304 if the client has it."""
    if _has(request, file.etag):
        return Response(None, 304, file.headers)
    return Response(file.content, 200, file.headers, file.media_type)


def kernel_response(digest: str, files: Files, media_type: str) -> Response:
    """Return the answer to a POST whose kernel exists: 201."""
    location = {"Location": kernel_url(digest)}
    if media_type == JSON:
        return Response(files["manifest"].content, 201, location, JSON)
    cubin = files["cubin"]
    return Response(cubin.content, 201, {**location, "ETag": cubin.etag, **cubin.disposition}, BINARY)


def accepted(job: JobRow) -> Response:
    """Return the answer to a POST whose kernels do not exist yet: 202 with the job, or its problem."""
    if job.error is not None and job.kind == "kernel":
        return problem_response(job.error)
    status = 201 if job.is_ended else 202
    return job_response(job, status, {"Location": job_url(job.id)})


def job_response(job: JobRow, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a ``schemas.JobView``, with Retry-After until the job has ended."""
    retry = {} if job.is_ended else {"Retry-After": str(RETRY_SECONDS)}
    content = job_view(job).model_dump(mode="json")
    return JSONResponse(content, status, {**(headers or {}), **retry, "Cache-Control": "no-store"})


def list_response(jobs: list[JobRow], following: int | None) -> Response:
    """Return a ``schemas.JobList``."""
    listed = [job_view(job).model_copy(update={"layers": None}) for job in jobs]
    view = JobList(jobs=listed, next=None if following is None else str(following))
    return JSONResponse(view.model_dump(mode="json"), headers={"Cache-Control": "no-store"})


def job_view(job: JobRow) -> JobView:
    """Return a job as its schema."""
    url = job_url(job.id)
    has_kernel = job.kind == "kernel" and job.state == JobState.SUCCEEDED
    own = ("id", "kind", "state", "attempts", "created", "started", "ended", "stage", "error")
    return JobView(
        **{name: getattr(job, name) for name in own},
        name=job.name or None,
        cancelling=job.is_cancelling,
        progress=_progress(job.progress),
        layers=[_layer(layer) for layer in job.layers] if job.kind == "model" else None,
        links=JobLinks(
            self=url,
            events=f"{url}/events",
            kernel=kernel_url(job.id) if has_kernel else None,
            archive=f"{url}/archive" if job.kind == "model" and job.is_ended else None,
        ),
    )


def _layer(layer: LayerState) -> LayerView:
    has_kernel = layer.digest is not None and layer.state == JobState.SUCCEEDED
    own = ("name", "n", "state", "stage", "error", "skipped", "m", "k", "nnz")
    return LayerView(
        **{name: getattr(layer, name) for name in own},
        progress=_progress(layer.progress),
        speedup_over_dense=layer.speedup,
        estimated_micros=layer.estimated_micros if has_kernel else None,
        job=None if layer.digest is None else job_url(layer.digest),
        kernel=kernel_url(str(layer.digest)) if has_kernel else None,
    )


def _progress(progress: Mapping[str, tuple[int, int]]) -> dict[str, StageProgress]:
    return {name: StageProgress(done=done, total=total) for name, (done, total) in progress.items()}


def _kernel_json(digest: str, artifact: Artifact) -> bytes:
    """Return a ``schemas.Kernel``."""
    url = kernel_url(digest)
    later = {part: f"{url}/{part}" if name in artifact.files else None for part, (name, *_) in _LATER.items()}
    links = KernelLinks(
        url, f"{url}/cubin", f"{url}/source", f"{url}/tuning", later["matrix"], later["space"], later["bias"]
    )
    return json.dumps({**artifact.manifest, "digest": digest, "links": asdict(links)}, indent=2).encode()


def _has(request: Request, etag: str) -> bool:
    """Return whether If-None-Match has the tag (RFC 9110, section 13.1.2: weak comparison, W/ is ignored)."""
    condition = ",".join(request.headers.getlist("if-none-match"))
    return bool(condition) and (condition.strip() == "*" or etag in re.findall(r'"[^"]*"', condition))
