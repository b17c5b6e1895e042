"""Kernels, their files and jobs as HTTP answers."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from lospmm.artifact import Artifact
from lospmm_server.job import Job
from lospmm_server.problems import problem_response
from lospmm_server.schemas import JobLinks, JobState, JobView, KernelLinks, StageProgress
from lospmm_server.workshop import RETRY_SECONDS

JSON = "application/json"
BINARY = "application/octet-stream"

#: A kernel's files follow from its digest, so that nobody needs to ask for them twice.
CACHE_CONTROL = "max-age=31536000, immutable"


def kernel_url(digest: str) -> str:
    return f"/v1/kernels/{digest}"


def job_url(digest: str) -> str:
    return f"/v1/jobs/{digest}"


def kernel_json(digest: str, artifact: Artifact) -> bytes:
    """A ``schemas.Kernel``."""
    url = kernel_url(digest)
    links = KernelLinks(url, f"{url}/cubin", f"{url}/source", f"{url}/tuning")
    return json.dumps({**artifact.manifest, "digest": digest, "links": asdict(links)}, indent=2).encode()


def posted(job: Job, media_type: str) -> Response:
    """The answer to a POST: 201 with the kernel as ``media_type``, 202 with the job, or the problem it ended with."""
    if job.error is not None:
        return problem_response(job.error)
    if job.artifact is None:
        return job_response(job, 202, {"Location": job_url(job.digest)})
    headers = {"Location": kernel_url(job.digest)}
    if media_type == JSON:
        return Response(kernel_json(job.digest, job.artifact), 201, headers, JSON)
    cubin = job.artifact.cubin
    headers |= {"ETag": _etag(cubin), **_disposition(cubin_name(job.artifact))}
    return Response(cubin, 201, headers, BINARY)


def job_response(job: Job, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A ``schemas.JobView``, with Retry-After for as long as there is something to wait for."""
    is_pending = job.state in (JobState.QUEUED, JobState.RUNNING)
    view = JobView(
        id=job.digest,
        state=job.state,
        stage=job.stage,
        progress={name: StageProgress(done=done, total=total) for name, (done, total) in job.progress.items()},
        error=job.error,
        links=JobLinks(
            self=job_url(job.digest), kernel=kernel_url(job.digest) if job.state is JobState.SUCCEEDED else None
        ),
    )
    retry = {"Retry-After": str(RETRY_SECONDS)} if is_pending else {}
    return JSONResponse(view.model_dump(mode="json"), status, {**(headers or {}), **retry, "Cache-Control": "no-store"})


def immutable(request: Request, content: bytes, media_type: str, filename: str | None = None) -> Response:
    """Content that never changes: 200, or 304 where the client has it."""
    etag = _etag(content)
    headers = {"ETag": etag, "Cache-Control": CACHE_CONTROL}
    if _has(request, etag):
        return Response(None, 304, headers)
    return Response(content, 200, {**headers, **(_disposition(filename) if filename else {})}, media_type)


def cubin_name(artifact: Artifact) -> str:
    return f"{artifact.manifest['name']}.cubin"


def _etag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()}"'


def _has(request: Request, etag: str) -> bool:
    """If-None-Match, RFC 9110, section 13.1.2: weak comparison, so that W/ does not matter."""
    condition = ",".join(request.headers.getlist("if-none-match"))
    return condition.strip() == "*" or etag in re.findall(r'"[^"]*"', condition)


def _disposition(filename: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{filename}"'}
