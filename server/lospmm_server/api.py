"""The routes. Each reads its parameters, calls one or two functions and returns what ``responses`` makes of it."""

from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import Response

from lospmm.artifact import SOURCE_FILES, TUNING_FILE
from lospmm_server import problems
from lospmm_server.negotiation import negotiate
from lospmm_server.readiness import reasons_not_ready
from lospmm_server.responses import BINARY, JSON, cubin_name, immutable, job_response, kernel_json, posted
from lospmm_server.schemas import Digest, Health, JobId, JobView, Kernel, KernelQuery, Wait
from lospmm_server.uploads import FIELD, read_request, received
from lospmm_server.workshop import Workshop

_FILE = {"type": "string", "format": "binary"}

_BODY = {
    "requestBody": {
        "required": True,
        "description": "A pruned weight matrix: .npz .npy .mtx .smtx .safetensors, known by its content.",
        "content": {
            "multipart/form-data": {
                "schema": {"type": "object", "properties": {FIELD: _FILE}, "required": [FIELD]},
            },
            BINARY: {"schema": _FILE},
        },
    }
}


def _problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI of the problems that a route may answer with."""
    titles = {kind.status: kind.title for kind in (*problems.STATUSES.values(), problems.BAD_PARAMETER)}
    content = {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": titles.get(status, "A problem"), "content": content} for status in statuses}


async def _workshop(request: Request) -> Workshop:
    return cast(Workshop, request.app.state.workshop)


async def _kernel_media_type(request: Request) -> str:
    return negotiate(",".join(request.headers.getlist("accept")), (JSON, BINARY))


Shop = Annotated[Workshop, Depends(_workshop)]
MediaType = Annotated[str, Depends(_kernel_media_type)]

router = APIRouter(responses=_problems(403))


@router.post(
    "/v1/kernels",
    status_code=201,
    openapi_extra=_BODY,
    responses={
        201: {"model": Kernel, "content": {BINARY: {"schema": _FILE}}, "description": "The kernel."},
        202: {"model": JobView, "description": "Not done yet; Location is the job."},
        **_problems(400, 406, 413, 422, 429, 500, 503),
    },
)
async def post_kernel(
    query: Annotated[KernelQuery, Query()], request: Request, shop: Shop, media_type: MediaType
) -> Response:
    """Tune a kernel for a matrix, or find the one there is.

    ```sh
    curl -F matrix=@W.npz 'localhost:8000/v1/kernels?n=4096&device=h200&wait=120' \\
        -H 'Accept: application/octet-stream' -o k.cubin
    ```
    """
    async with received(request) as upload:
        job = shop.submit(await shop.take(lambda: read_request(upload, query)))
    await job.wait(query.wait)
    return posted(job, media_type)


@router.get("/v1/kernels/{digest}", responses={200: {"model": Kernel}, **_problems(404, 422)})
def get_kernel(digest: Digest, request: Request, shop: Shop) -> Response:
    """The manifest of a kernel."""
    return immutable(request, kernel_json(digest, shop.kernel(digest)), JSON)


@router.get(
    "/v1/kernels/{digest}/cubin",
    response_class=Response,
    responses={200: {"content": {BINARY: {"schema": _FILE}}}, **_problems(404, 422)},
)
def get_cubin(digest: Digest, request: Request, shop: Shop) -> Response:
    """The binary to load."""
    kernel = shop.kernel(digest)
    return immutable(request, kernel.cubin, BINARY, cubin_name(kernel))


@router.get(
    "/v1/kernels/{digest}/source",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **_problems(404, 422)},
)
def get_source(digest: Digest, request: Request, shop: Shop) -> Response:
    """The text that the binary was compiled from."""
    kernel = shop.kernel(digest)
    return immutable(request, kernel.source, "text/plain", SOURCE_FILES[kernel.manifest["emitter"]])


@router.get(
    "/v1/kernels/{digest}/tuning",
    response_class=Response,
    responses={200: {"content": {"application/x-ndjson": {}}}, **_problems(404, 422)},
)
def get_tuning(digest: Digest, request: Request, shop: Shop) -> Response:
    """The shortlist of the search, a JSON object a line, best first."""
    return immutable(request, shop.kernel(digest).files[TUNING_FILE], "application/x-ndjson")


@router.get("/v1/jobs/{id}", response_model=JobView, responses=_problems(404, 422))
async def get_job(digest: JobId, shop: Shop, wait: Wait = 0.0) -> Response:
    """How far a job is; its id is the digest of its kernel."""
    job = await shop.find_job(digest)
    await job.wait(wait)
    return job_response(job)


@router.get("/healthz", response_model=Health)
async def get_health() -> Health:
    """The process answers."""
    return Health(status="ok")


@router.get("/readyz", response_model=Health, responses=_problems(503))
def get_readiness(shop: Shop) -> Health:
    """A kernel could be tuned now; 503 says why not."""
    reasons = ["the service is stopping"] if shop.is_stopping else reasons_not_ready(shop.store)
    if reasons:
        raise HTTPException(503, "; ".join(reasons))
    return Health(status="ready")
