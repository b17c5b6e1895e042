"""The body of a POST: matrix files, raw or as fields ``matrix`` of a form, within the limits of size and time.

FastAPI's own ``max_body_size`` is not used: where a Content-Length is given it puts plain text in the place of
problem+json.
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import HTTPException, Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from lospmm import jobs, readers
from lospmm.content import content_of
from lospmm.device import DEVICES, DeviceSpec
from lospmm.errors import BadRequest
from lospmm.model import Problem
from lospmm.options import Options
from lospmm.readers import MatrixFile
from lospmm.runtime.detect import detect_device
from lospmm.settings import settings
from lospmm_server.schemas import KernelQuery, TuningQuery

FIELD = "matrix"

#: What a form may add to its files, to each of them: boundaries and headers.
FORM_BYTES = 1 << 16

#: The most layers of a model, in a file or as files.
MAX_LAYERS = 2000


def received(request: Request, *, files: int = 1) -> AbstractAsyncContextManager[Sequence[UploadFile]]:
    """The files of the body, at most so many, on disk unless they are small, until the block ends.

    Entering raises HTTPException 413 for more than LOSPMM_MAX_UPLOAD_BYTES, 408 for longer than LOSPMM_UPLOAD_SECONDS,
    and 400 for a form without files or with anything else.
    """
    limit = settings().max_upload_bytes
    is_form = request.headers.get("content-type", "").lower().startswith("multipart/form-data")
    return _from_form(request, limit, files) if is_form else _raw(request, limit)


def read_request(upload: UploadFile, query: KernelQuery) -> jobs.Request:
    """What is to be tuned. Raises BadMatrix, BadRequest and Unsupported."""
    device, options = device_and_options(query)
    file = readers.read_bytes(content_of(upload.file), upload.filename or FIELD, tensor=query.tensor, seed=query.seed)
    return settled(file, query, device, options)


def device_and_options(query: TuningQuery) -> tuple[DeviceSpec, Options]:
    """Raises BadRequest and Unsupported."""
    if query.n > settings().max_n:
        raise BadRequest(f"n is {query.n}, more than the {settings().max_n} that LOSPMM_MAX_N allows")
    options = Options(emitter=query.emitter, verify=query.verify, dtype=query.dtype, families=query.families)
    return _device(query.device), options


def settled(file: MatrixFile, query: TuningQuery, device: DeviceSpec, options: Options) -> jobs.Request:
    """A request for the workers, with nothing left to decide. Raises BadRequest for a GPU that they lack."""
    request = jobs.Request(Problem(file.matrix, query.n, device), options, file.values, query.seed)
    return request.settled(settings().worker_gpu)


def _device(name: str) -> DeviceSpec:
    """By the table alone: a client must not make the service open device files."""
    chosen = settings().worker_gpu if name == "auto" else name
    if chosen is None:
        return detect_device()
    if chosen not in DEVICES:
        raise BadRequest(f"unknown device {chosen!r}: expected auto or one of {', '.join(DEVICES)}")
    return DEVICES[chosen]


@asynccontextmanager
async def _raw(request: Request, limit: int) -> AsyncIterator[Sequence[UploadFile]]:
    with tempfile.TemporaryFile() as file:
        upload = UploadFile(file, filename=FIELD)
        async for chunk in body_within(request, limit):
            await upload.write(chunk)
        await upload.seek(0)
        yield [upload]


@asynccontextmanager
async def _from_form(request: Request, limit: int, files: int) -> AsyncIterator[Sequence[UploadFile]]:
    body = body_within(request, limit + FORM_BYTES * files)
    try:
        form = await MultiPartParser(request.headers, body, max_files=files).parse()
    except MultiPartException as error:
        raise HTTPException(400, error.message) from None
    try:
        uploads = [upload for upload in form.getlist(FIELD) if isinstance(upload, UploadFile)]
        if not 1 <= len(uploads) <= files or len(form.multi_items()) != len(uploads):
            count = "one file" if files == 1 else f"1 to {files} files"
            raise HTTPException(400, f"expected {count}, in the field {FIELD!r}, as curl -F {FIELD}=@W.npz sends it")
        if sum(upload.size or 0 for upload in uploads) > limit:
            raise _too_large()
        yield uploads
    finally:
        await form.close()


async def body_within(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """The body by the piece. Raises HTTPException 408, and 413: at once where the header says so, else at the limit."""
    if int(request.headers.get("content-length", 0)) > limit:
        raise _too_large()
    size, stream = 0, request.stream().__aiter__()
    deadline = asyncio.get_running_loop().time() + settings().upload_seconds
    while True:
        try:
            chunk = await asyncio.wait_for(anext(stream), deadline - asyncio.get_running_loop().time())
        except StopAsyncIteration:
            return
        except TimeoutError:
            seconds = settings().upload_seconds
            message = f"the body did not arrive within the {seconds:g} s that LOSPMM_UPLOAD_SECONDS allows"
            raise HTTPException(408, message, {"Connection": "close"}) from None
        size += len(chunk)
        if size > limit:
            raise _too_large()
        yield chunk


def _too_large() -> HTTPException:
    return HTTPException(
        413, f"the body is larger than the {settings().max_upload_bytes} bytes that LOSPMM_MAX_UPLOAD_BYTES allows"
    )
