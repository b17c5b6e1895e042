"""The body of a POST: one matrix file, raw or as the field ``matrix`` of a form, within the size limit.

FastAPI's own ``max_body_size`` is not used: where a Content-Length is given it puts plain text in the place of
problem+json.
"""

import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import HTTPException, Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from lospmm import jobs, readers
from lospmm.device import DEVICES, DeviceSpec
from lospmm.errors import BadRequest
from lospmm.model import Problem
from lospmm.options import Options
from lospmm.runtime.detect import detect_device
from lospmm.settings import settings
from lospmm_server.schemas import KernelQuery

FIELD = "matrix"

#: What a form may add to its file: boundaries and headers.
FORM_BYTES = 1 << 16


def received(request: Request) -> AbstractAsyncContextManager[UploadFile]:
    """The file of the body, on disk unless it is small, until the block ends.

    Entering raises HTTPException 413 for more than LOSPMM_MAX_UPLOAD_BYTES and 400 for a form without exactly one file.
    """
    limit = settings().max_upload_bytes
    is_form = request.headers.get("content-type", "").lower().startswith("multipart/form-data")
    return _from_form(request, limit) if is_form else _raw(request, limit)


def read_request(upload: UploadFile, query: KernelQuery) -> jobs.Request:
    """What is to be tuned. Raises BadMatrix, BadRequest and Unsupported."""
    device = _device(query.device)
    options = Options(emitter=query.emitter, verify=query.verify)
    content = upload.file.read()
    file = readers.read_bytes(content, upload.filename or FIELD, tensor=query.tensor, seed=query.seed)
    return jobs.Request(Problem(file.matrix, query.n, device), options, file.values, query.seed)


def _device(name: str) -> DeviceSpec:
    """By the table alone: a client must not make the service open device files."""
    if name == "auto":
        return detect_device()
    if name not in DEVICES:
        raise BadRequest(f"unknown device {name!r}: expected auto or one of {', '.join(DEVICES)}")
    return DEVICES[name]


@asynccontextmanager
async def _raw(request: Request, limit: int) -> AsyncIterator[UploadFile]:
    with tempfile.TemporaryFile() as file:
        upload = UploadFile(file, filename=FIELD)
        async for chunk in _body(request, limit):
            await upload.write(chunk)
        await upload.seek(0)
        yield upload


@asynccontextmanager
async def _from_form(request: Request, limit: int) -> AsyncIterator[UploadFile]:
    try:
        form = await MultiPartParser(request.headers, _body(request, limit + FORM_BYTES), max_files=1).parse()
    except MultiPartException as error:
        raise HTTPException(400, error.message) from None
    try:
        upload = form.get(FIELD)
        if not isinstance(upload, UploadFile) or len(form.multi_items()) != 1:
            raise HTTPException(400, f"expected one file, in the field {FIELD!r}, as curl -F {FIELD}=@W.npz sends it")
        if (upload.size or 0) > limit:
            raise _too_large()
        yield upload
    finally:
        await form.close()


async def _body(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """The body piece by piece. Raises HTTPException 413: at once where the header says so, else at the limit."""
    if int(request.headers.get("content-length", 0)) > limit:
        raise _too_large()
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large()
        yield chunk


def _too_large() -> HTTPException:
    return HTTPException(
        413, f"the body is larger than the {settings().max_upload_bytes} bytes that LOSPMM_MAX_UPLOAD_BYTES allows"
    )
