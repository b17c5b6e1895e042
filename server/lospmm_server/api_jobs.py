"""Routes of jobs: their progress, their events, and cancellation."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Query
from fastapi.responses import Response, StreamingResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent

from lospmm.artifact.artifact import Artifact
from lospmm_server import queries
from lospmm_server.archive import model_name, zipped
from lospmm_server.keys import Caller
from lospmm_server.queries import EventRow, JobRow
from lospmm_server.responses import ZIP, job_response, kernel_url, list_response
from lospmm_server.routing import FILE, By, problems_of
from lospmm_server.schemas import PAGE, Cursor, JobId, JobList, JobState, JobView, LastEventId, Limit, Wait
from lospmm_server.service import Behind, Service

#: Events of layers that are not sent for their model: listeners get the layers' own events.
_OF_MODELS = {"posted": "queued", "stopped": "cancelled"}

router = APIRouter(tags=["jobs"])


@router.get("/v1/jobs", response_model=JobList, responses=problems_of(401, 403, 422, 503))
async def get_jobs(
    behind: Behind,
    caller: By,
    state: Annotated[JobState | None, Query(description="Only jobs in this state.")] = None,
    cursor: Cursor = None,
    limit: Limit = PAGE,
) -> Response:
    """List the jobs that were posted, the last queued first."""
    before = None if cursor is None else int(cursor)
    return list_response(*await behind.ask(queries.page_of_jobs, behind.database, state, before, limit, caller.sees))


@router.get("/v1/jobs/{id}", response_model=JobView, responses=problems_of(401, 403, 404, 422, 503))
async def get_job(job_id: JobId, behind: Behind, caller: By, wait: Wait = 0.0) -> Response:
    """Return the progress of a job; of a model's with each of its layers."""
    return job_response(await behind.wait_for(job_id, wait, caller))


@router.delete(
    "/v1/jobs/{id}",
    response_model=JobView,
    responses={
        202: {"model": JobView, "description": "It is told to stop."},
        **problems_of(401, 403, 404, 422, 503),
    },
)
async def cancel_job(job_id: JobId, behind: Behind, caller: By) -> Response:
    """Cancel a job. An ended job stays as it is; of a model, kernels that others wait for go on."""
    job = await behind.cancel(job_id, caller)
    return job_response(job, 200 if job.is_ended else 202)


@router.get(
    "/v1/jobs/{id}/archive",
    response_class=StreamingResponse,
    responses={
        200: {"content": {ZIP: {"schema": FILE}}, "description": "The zip of a folder of `lospmm tune-model`."},
        **problems_of(401, 403, 404, 409, 422, 503),
    },
)
async def get_archive(job_id: JobId, behind: Behind, caller: By) -> Response:
    """Return all kernels of a model that has ended, and report.json about its layers."""
    job = await behind.job(job_id, caller)
    if job.kind != "model":
        raise HTTPException(404, f"{job_id}: is no model; a kernel's files are at {kernel_url(job_id)}")
    if not job.is_ended:
        raise HTTPException(409, f"{job_id}: is {job.state} yet: wait for its end")

    def find(digest: str) -> Artifact | None:
        found = behind.shelf.at_hand(digest) or behind.shelf.find(digest)
        return None if found is None else found.artifact

    headers = {"Content-Disposition": f'attachment; filename="{model_name(job)}.zip"', "Cache-Control": "no-store"}
    return StreamingResponse(zipped(job, find), media_type=ZIP, headers=headers)


async def _listened_to(
    job_id: JobId, behind: Behind, caller: By, last_event_id: LastEventId = None
) -> tuple[JobRow, int]:
    """Return the job, and the event after which to begin. Raises HTTPException 404, and 204 at the end."""
    after = int(last_event_id) if last_event_id and last_event_id.isascii() and last_event_id.isdecimal() else 0
    after = min(after, 2**62)  # limit of a database's integers
    job = await behind.job(job_id, caller)
    if after and job.is_ended and not await behind.ask(queries.events_after, behind.database, job.watched, after, 1):
        raise HTTPException(204)  # which stops a browser from asking again
    return job, after


@router.get(
    "/v1/jobs/{id}/events",
    response_class=EventSourceResponse,
    responses={
        200: {"content": {"text/event-stream": {}}, "description": "Server-sent events until the job has ended."},
        204: {"description": "The client has every event of a job that has ended."},
        **problems_of(401, 403, 404, 422, 503),
    },
)
async def get_events(
    listened_to: Annotated[tuple[JobRow, int], Depends(_listened_to)], behind: Behind, caller: By
) -> AsyncIterator[ServerSentEvent]:
    """Stream the events of a job, or of a model's layers, from the beginning to the end.

    With ``Last-Event-ID``, the stream begins after that event.
    """
    job, after = listened_to
    names = {layer.digest: layer.name for layer in job.layers}
    with behind.watch.subscribed(job.watched) as changed:
        while behind.admits(caller):
            changed.clear()
            now = await behind.job(job.id, caller)  # before its events: none that follows its end is missed
            for event in await _all_after(behind, job.watched, after):
                after = event.id
                yield _sent(event, names, job.name, caller)
            if now.is_ended or behind.is_stopping:
                break
            await changed.wait()
        else:  # the key is no longer valid
            return
    yield ServerSentEvent(event="state", id=str(after) if after else None, data={"job": job.id, "state": now.state})


async def _all_after(behind: Service, jobs: list[str], after: int) -> list[EventRow]:
    found: list[EventRow] = []
    while more := await behind.ask(queries.events_after, behind.database, jobs, after):
        found += more
        after = more[-1].id
    return found


def _sent(event: EventRow, names: dict[str | None, str], model: str, caller: Caller) -> ServerSentEvent:
    data: dict[str, Any] = {"job": event.job, "time": event.time.isoformat(), **event.data}
    if caller.sees is not None and data.get("model") != model:
        data.pop("model", None)  # another team's may have had the kernel first
    if event.job in names:
        data["layer"] = names[event.job]
    return ServerSentEvent(event=_OF_MODELS.get(event.kind, event.kind), id=str(event.id), data=data)
