"""Routes of kernels. Each reads its parameters, calls one or two functions and returns a response."""

from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import Response

from lospmm_server.keys import Caller
from lospmm_server.responses import BINARY, Part, accepted, immutable, kernel_response
from lospmm_server.routing import FILE, By, MediaType, body, problems_of
from lospmm_server.schemas import Digest, JobState, JobView, Kernel, KernelQuery
from lospmm_server.service import Behind, Service
from lospmm_server.uploads import read_request, received

_BODY = body(
    "A pruned weight matrix: .npz .npy .mtx .smtx .safetensors .onnx .pt, known by its content; a bias: .npy.",
    bias=True,
)

#: The other answers to a request for a kernel's file.
_OTHERWISE = {
    304: {"description": "The client has it already (If-None-Match)."},
    **problems_of(401, 403, 404, 422, 503),
}

router = APIRouter(tags=["kernels"])


@router.post(
    "/v1/kernels",
    status_code=201,
    openapi_extra=_BODY,
    responses={
        201: {"model": Kernel, "content": {BINARY: {"schema": FILE}}, "description": "The kernel."},
        202: {"model": JobView, "description": "Not done yet; Location is the job."},
        **problems_of(400, 401, 403, 406, 408, 409, 413, 415, 422, 429, 500, 503),
    },
)
async def post_kernel(
    query: Annotated[KernelQuery, Query()], request: Request, behind: Behind, media_type: MediaType, caller: By
) -> Response:
    r"""Tune a kernel for a matrix, or find the existing one.

    ```sh
    curl -F matrix=@W.npz 'localhost:8000/v1/kernels?n=4096&device=h200&wait=120' \
        -H 'Accept: application/octet-stream' -o k.cubin
    ```
    """
    async with received(request) as files:
        order = await behind.take(lambda: behind.order(read_request(files, query), caller), files.size)
    await behind.post(order, caller)
    if not order.is_kept:
        job = await behind.wait_for(order.digest, query.wait, caller)
        if job.state != JobState.SUCCEEDED:
            return accepted(job)
    return kernel_response(order.digest, (await behind.kernel(order.digest, caller)).files, media_type)


@router.get("/v1/kernels/{digest}", responses={200: {"model": Kernel}, **_OTHERWISE})
async def get_kernel(digest: Digest, request: Request, behind: Behind, caller: By) -> Response:
    """Return the manifest of a kernel."""
    return await _sent(digest, "manifest", request, behind, caller)


@router.get(
    "/v1/kernels/{digest}/cubin",
    response_class=Response,
    responses={200: {"content": {BINARY: {"schema": FILE}}}, **_OTHERWISE},
)
async def get_cubin(digest: Digest, request: Request, behind: Behind, caller: By) -> Response:
    """Return the binary to load."""
    return await _sent(digest, "cubin", request, behind, caller)


@router.get(
    "/v1/kernels/{digest}/source",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **_OTHERWISE},
)
async def get_source(digest: Digest, request: Request, behind: Behind, caller: By) -> Response:
    """Return the text that the binary was compiled from."""
    return await _sent(digest, "source", request, behind, caller)


@router.get(
    "/v1/kernels/{digest}/tuning",
    response_class=Response,
    responses={200: {"content": {"application/x-ndjson": {}}}, **_OTHERWISE},
)
async def get_tuning(digest: Digest, request: Request, behind: Behind, caller: By) -> Response:
    """Return the shortlist of the search, a JSON object a line, best first."""
    return await _sent(digest, "tuning", request, behind, caller)


@router.get(
    "/v1/kernels/{digest}/matrix",
    response_class=Response,
    responses={200: {"content": {BINARY: {"schema": FILE}}}, **_OTHERWISE},
)
async def get_matrix(digest: Digest, request: Request, behind: Behind, caller: By) -> Response:
    """Return the matrix that the kernel multiplies by, as an .npz of SciPy."""
    return await _sent(digest, "matrix", request, behind, caller)


@router.get(
    "/v1/kernels/{digest}/bias",
    response_class=Response,
    responses={200: {"content": {BINARY: {"schema": FILE}}}, **_OTHERWISE},
)
async def get_bias(digest: Digest, request: Request, behind: Behind, caller: By) -> Response:
    """Return the bias that is in the kernel's code, as a .npy."""
    return await _sent(digest, "bias", request, behind, caller)


@router.get(
    "/v1/kernels/{digest}/space",
    response_class=Response,
    responses={200: {"content": {"application/json": {}}}, **_OTHERWISE},
)
async def get_space(digest: Digest, request: Request, behind: Behind, caller: By) -> Response:
    """Return the tiling space: the verdict on every tile size."""
    return await _sent(digest, "space", request, behind, caller)


async def _sent(digest: str, part: Part, request: Request, behind: Service, caller: Caller) -> Response:
    files = (await behind.kernel(digest, caller)).files
    if part not in files:
        why = "this kernel adds none" if part == "bias" else f"an earlier version made this kernel, without its {part}"
        raise HTTPException(404, f"{digest}: {why}")
    return immutable(request, files[part])
