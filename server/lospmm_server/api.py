"""Routes of kernels. Each reads its parameters, calls one or two functions and returns a response."""

from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import Response

from lospmm_server.keys import Caller
from lospmm_server.responses import BINARY, JSON, Part, accepted, immutable, kernel_response
from lospmm_server.routing import FILE, By, MediaType, body, problems_of
from lospmm_server.schemas import Digest, JobState, JobView, Kernel, KernelQuery
from lospmm_server.service import Behind, Service
from lospmm_server.uploads import name_of, read_request, received

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
    await behind.post(order, caller, name_of(files, query))
    if not order.is_kept:
        job = await behind.wait_for(order.digest, query.wait, caller)
        if job.state != JobState.SUCCEEDED:
            return accepted(job)
    return kernel_response(order.digest, (await behind.kernel(order.digest, caller)).files, media_type)


@router.get("/v1/kernels/{digest}", responses={200: {"model": Kernel}, **_OTHERWISE})
async def get_kernel(digest: Digest, request: Request, behind: Behind, caller: By) -> Response:
    """Return the manifest of a kernel."""
    return await _sent(digest, "manifest", request, behind, caller)


def _add_part(part: Part, media_type: str, description: str) -> None:
    async def get_part(digest: Digest, request: Request, behind: Behind, caller: By) -> Response:
        return await _sent(digest, part, request, behind, caller)

    content = {media_type: {"schema": FILE} if media_type == BINARY else {}}
    router.get(
        f"/v1/kernels/{{digest}}/{part}",
        name=f"get_{part}",
        description=description,
        response_class=Response,
        responses={200: {"content": content}, **_OTHERWISE},
    )(get_part)


_add_part("cubin", BINARY, "Return the binary to load.")
_add_part("source", "text/plain", "Return the text that the binary was compiled from.")
_add_part("tuning", "application/x-ndjson", "Return the shortlist of the search, a JSON object a line, best first.")
_add_part("matrix", BINARY, "Return the matrix that the kernel multiplies by, as an .npz of SciPy.")
_add_part("bias", BINARY, "Return the bias that is in the kernel's code, as a .npy.")
_add_part("space", JSON, "Return the tiling space: the verdict on every tile size.")


async def _sent(digest: str, part: Part, request: Request, behind: Service, caller: Caller) -> Response:
    files = (await behind.kernel(digest, caller)).files
    if part not in files:
        why = "this kernel adds none" if part == "bias" else f"an earlier version made this kernel, without its {part}"
        raise HTTPException(404, f"{digest}: {why}")
    return immutable(request, files[part])
