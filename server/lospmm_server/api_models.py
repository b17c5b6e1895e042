"""Routes of models: a batch of kernels, one for each layer."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from lospmm_server.models import read_model
from lospmm_server.responses import accepted
from lospmm_server.routing import By, body, problems_of
from lospmm_server.schemas import JobView, ModelQuery
from lospmm_server.service import Behind
from lospmm_server.uploads import MAX_LAYERS, received

_BODY = body(
    "A .safetensors, .onnx or .pt, each 2-D to 4-D weight of which is a layer; or matrix files, one a layer; biases: "
    ".npy files called as their layers; layers: a layer table, TOML or JSON, with n or a convolution for each layer.",
    several=True,
    bias=True,
)

router = APIRouter(tags=["models"])


@router.post(
    "/v1/models",
    status_code=202,
    openapi_extra=_BODY,
    responses={
        201: {"model": JobView, "description": "Every layer has ended; some may have failed."},
        202: {"model": JobView, "description": "Layers are waiting or being tuned; Location is the job."},
        **problems_of(400, 401, 403, 408, 413, 415, 422, 429, 500, 503),
    },
)
async def post_model(query: Annotated[ModelQuery, Query()], request: Request, behind: Behind, caller: By) -> Response:
    """Tune a kernel for each layer of a model. Equal layers are tuned once, and one bad layer fails alone.

    With several n, as 1,8,512, a layer has a kernel for each. With a layer table it has its own n or convolution.

    ```sh
    curl -F matrix=@model.safetensors 'localhost:8000/v1/models?n=4096&device=h200'
    curl -F matrix=@model.safetensors -F layers=@layers.toml 'localhost:8000/v1/models?device=h200'
    curl -F matrix=@fc1.npz -F matrix=@fc2.npz 'localhost:8000/v1/models?n=4096&device=h200&name=mlp'
    ```
    """
    async with received(request, files=MAX_LAYERS) as files:
        read = partial(read_model, files, query, team=caller.team)
        model = await behind.post_model(read, files.size, caller)
    return accepted(await behind.wait_for(model.id, query.wait, caller))
