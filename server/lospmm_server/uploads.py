"""Bodies of POST requests: matrix files, raw or as form fields, within limits of size and time.

Matrices are the fields ``matrix``. Beside them a form may have biases, each a ``.npy`` with a number for each row of
a matrix; that of a model a layer table.

FastAPI's own ``max_body_size`` is not used: for a Content-Length it answers with plain text instead of problem+json.
"""

import asyncio
import errno
import logging
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from fastapi import HTTPException, Request
from numpy.typing import NDArray
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from lospmm.errors import BadRequest, BadSettings, LospmmError, printable
from lospmm.gpu.detect import detect_device, own_gpu
from lospmm.matrix.mapped import content_of
from lospmm.matrix.readers import bias_in, read_bytes
from lospmm.model.layer_table import LayerSpec
from lospmm.problem.device import DEVICES, USUAL_DEVICE, DeviceSpec, known_device
from lospmm.settings import settings
from lospmm.toolchain.discover import find_toolkit, has_arch
from lospmm.tuning.options import SERVED_OPTIONS, Options
from lospmm.tuning.request import Request as TuningRequest
from lospmm_server.schemas import KernelQuery, TuningQuery

#: The value of LOSPMM_WORKER_GPU for workers without a GPU.
NO_GPU = "none"

FIELD = "matrix"
BIAS_FIELD = "bias"
TABLE_FIELD = "layers"

#: Bytes that a form may add to each file: boundaries and headers.
FORM_BYTES = 1 << 16

#: Files of a form up to so many bytes stay in memory; each of the others is a file, and open.
SMALL_BYTES = 1 << 16

#: The most layers of a model, in a file or as files.
MAX_LAYERS = 2000

#: The most characters of the name of a model or a kernel in the tables.
NAME_CHARACTERS = 200

#: The most fields of a form beside its files that are read before it is refused: none is expected.
MAX_FIELDS = 1000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Received:
    """The files of a body."""

    matrices: Sequence[UploadFile]
    biases: Sequence[UploadFile] = ()
    table: UploadFile | None = None

    @property
    def size(self) -> int:
        """Bytes of the matrices."""
        return sum(upload.size or 0 for upload in self.matrices)


class UploadRoom:
    """The bytes of all bodies that are being received or read; of one event loop."""

    def __init__(self) -> None:
        self.held = 0

    def check(self, own: int, more: int) -> None:
        """Raise HTTPException 503 if ``more`` of a body are over LOSPMM_MAX_UPLOADS_BYTES, with ``own`` and others."""
        others = self.held - own
        if others and self.held + more > settings().max_uploads_bytes:  # alone it may have any size that one may have
            raise HTTPException(503, f"the service holds {others} bytes of other uploads now; post again later")


def received(request: Request, *, files: int = 1) -> AbstractAsyncContextManager[Received]:
    """Yield the files of the body, at most ``files`` matrices; larger ones are on disk.

    There may be as many biases. Entering raises HTTPException 413 for more than LOSPMM_MAX_UPLOAD_BYTES, 408 for
    longer than LOSPMM_UPLOAD_SECONDS, 400 for a form that is cut, without files or with anything else, and 503 if the
    disk does not take them, or with those of others they are over LOSPMM_MAX_UPLOADS_BYTES.
    """
    limit = settings().max_upload_bytes
    is_form = request.headers.get("content-type", "").lower().startswith("multipart/form-data")
    return _from_form(request, limit, files) if is_form else _raw(request, limit)


def read_request(files: Received, query: KernelQuery) -> TuningRequest:
    """Return the request of one matrix. Raises BadMatrix, BadRequest and Unsupported."""
    row = LayerSpec(**row_keys(query))
    check_n(row.columns)
    device, options = device_of(query), options_of(query)
    bias = bias_of(files.biases[0]) if files.biases else None
    upload = files.matrices[0]
    file = read_bytes(content_of(upload.file), upload.filename or FIELD, tensor=query.tensor, seed=query.seed)
    return row.request(file, bias, device, options, query.seed).settled(settings().worker_gpu)


def name_of(files: Received, query: KernelQuery) -> str:
    """Return what a matrix is called: its tensor, or the stem of its file; empty of one that is the body."""
    file = files.matrices[0].filename
    return printable(query.tensor or (stem_of(file) if file else ""))[:NAME_CHARACTERS]


def stem_of(file: str) -> str:
    """Return a file's name without its folder and suffix, on one line."""
    name = PurePosixPath(file.replace("\\", "/")).stem or "layer"
    return "".join(char if char.isprintable() else "?" for char in name)[-NAME_CHARACTERS:]


def bias_of(upload: UploadFile) -> NDArray[np.floating]:
    """Return an uploaded bias. Raises BadRequest unless it is a ``.npy`` with a row of numbers."""
    return bias_in(content_of(upload.file), upload.filename or BIAS_FIELD)


def row_keys(query: TuningQuery) -> dict[str, Any]:
    """Return the keys of a layer's row that a query has, as by default where it does not say."""
    return {key: getattr(query, key) for key in ("n", "conv", "transpose", "relu", "residual")}


def check_n(n: int) -> None:
    """Raise BadRequest for more columns of B than the service takes."""
    if n > settings().max_n:
        raise BadRequest(f"n is {n}, more than the {settings().max_n} that LOSPMM_MAX_N allows")


def options_of(query: TuningQuery) -> Options:
    """Return the options of a query. Raises BadRequest."""
    return Options(**{name: getattr(query, name) for name in SERVED_OPTIONS})


def check_worker_gpu(name: str | None) -> None:
    """Check LOSPMM_WORKER_GPU. Raises BadSettings."""
    if name is not None and name not in (NO_GPU, *DEVICES):
        raise BadSettings(f"LOSPMM_WORKER_GPU: {name!r:.80} is none of {', '.join(DEVICES)}, {NO_GPU}")


def has_gpu() -> bool:
    """Return whether the device "auto" is a GPU."""
    workers = settings().worker_gpu
    return own_gpu() is not None if workers is None else workers != NO_GPU


def offered_devices() -> list[DeviceSpec]:
    """Return the devices that the toolkit can compile for; all without a toolkit, which a POST reports."""
    try:
        toolkit = find_toolkit()
    except LospmmError:
        return list(DEVICES.values())
    return [device for device in DEVICES.values() if has_arch(toolkit, device.arch)]


def device_of(query: TuningQuery) -> DeviceSpec:
    """Return a device of the table: a client must not make the service open device files. Raises BadRequest."""
    name, workers = query.device, settings().worker_gpu
    chosen = workers if name == "auto" else name
    if chosen is None:
        try:
            return detect_device()
        except BadRequest:  # its message is for users who may name device files
            why = "device auto: this service has no GPU of the device table"
            raise BadRequest(f"{why}; name the one to tune for, such as {USUAL_DEVICE}") from None
    if name == "auto" and workers == NO_GPU:
        raise BadRequest("device auto: this service's workers have no GPU; name the one to tune for, such as h200")
    if (known := known_device(chosen)) is None:
        raise BadRequest(f"unknown device {chosen!r}: expected auto or one of {', '.join(DEVICES)}")
    return known


@asynccontextmanager
async def _raw(request: Request, limit: int) -> AsyncIterator[Received]:
    with body_within(request, limit) as body:
        upload = await _written(body)
        try:
            yield Received([upload])
        finally:
            await upload.close()


async def _written(body: AsyncGenerator[bytes, None]) -> UploadFile:
    with _to_disk(), ExitStack() as stack:
        upload = UploadFile(stack.enter_context(tempfile.TemporaryFile()), size=0)
        async for chunk in body:
            await upload.write(chunk)
        await upload.seek(0)  # everything has been written by now
        stack.pop_all()
        return upload


@asynccontextmanager
async def _from_form(request: Request, limit: int, files: int) -> AsyncIterator[Received]:
    most = 2 * files + (files > 1)  # a bias each, and a model's layer table
    async with form_of(request, limit + FORM_BYTES * most, max_files=most) as form:
        uploads, biases, tables = (
            [upload for upload in form.getlist(field) if isinstance(upload, UploadFile)]
            for field in (FIELD, BIAS_FIELD, TABLE_FIELD)
        )
        others = len(form.multi_items()) - len(uploads) - len(tables)
        fits = 1 <= len(uploads) <= files and others == len(biases) <= len(uploads)
        if not fits or len(tables) > (files > 1):
            count = "one file" if files == 1 else f"1 to {files} files"
            beside = f", and perhaps {'one' if files == 1 else 'one for each'} in {BIAS_FIELD!r}"
            beside += "" if files == 1 else f" and one in {TABLE_FIELD!r}"
            raise HTTPException(
                400, f"expected {count}, in the field {FIELD!r}, as curl -F {FIELD}=@W.npz sends it{beside}"
            )
        if sum(upload.size or 0 for upload in (*uploads, *biases, *tables)) > limit:
            raise _too_large()
        yield Received(uploads, biases, tables[0] if tables else None)


class _WholeForm(MultiPartParser):
    """Parser that refuses a form without its end; Starlette drops the part that is cut, a bias or a layer."""

    spool_max_size = SMALL_BYTES

    def __init__(self, headers: Headers, body: AsyncGenerator[bytes, None], *, max_files: int, max_fields: int) -> None:
        super().__init__(headers, self._to_its_end(body), max_files=max_files, max_fields=max_fields)
        self._is_whole = False

    def on_end(self) -> None:
        self._is_whole = True

    async def _to_its_end(self, body: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        async for chunk in body:
            yield chunk
        if not self._is_whole:
            raise MultiPartException("the form ends before its last boundary: a part of it is missing")


@asynccontextmanager
async def form_of(
    request: Request, limit: int, *, max_files: int, max_fields: int = MAX_FIELDS
) -> AsyncIterator[FormData]:
    """Yield a whole form of at most ``limit`` bytes, and close it. Raises as its body; HTTPException 400, 503."""
    with body_within(request, limit) as body:
        form = await _parsed(request.headers, body, max_files=max_files, max_fields=max_fields)
        try:
            yield form
        finally:
            await form.close()


async def _parsed(headers: Headers, body: AsyncGenerator[bytes, None], *, max_files: int, max_fields: int) -> FormData:
    try:
        with _to_disk():
            return await _WholeForm(headers, body, max_files=max_files, max_fields=max_fields).parse()
    except MultiPartException as error:
        raise HTTPException(400, error.message) from None
    except UnicodeError:
        raise HTTPException(400, "a name in the form is not of the charset that its header Content-Type has") from None


@contextmanager
def _to_disk() -> Iterator[None]:
    """Raise HTTPException 503 if an upload cannot be written, as on a full disk."""
    try:
        yield
    except OSError as error:
        _log.warning("an upload cannot be written down: %s", error)
        who = "service" if error.errno in (errno.EMFILE, errno.ENFILE) else "disk of the service"
        why = f"the {who} takes no upload now: {error.strerror or error}"
        raise HTTPException(503, why) from None


@contextmanager
def body_within(request: Request, limit: int) -> Iterator[AsyncGenerator[bytes, None]]:
    """Yield the body in pieces, which are held until the block ends.

    Reading raises HTTPException 415, 408, and 413 and 503 for too many bytes, at once if Content-Length says so.
    """
    room: UploadRoom = request.app.state.uploads
    own = 0

    async def counted() -> AsyncGenerator[bytes, None]:
        nonlocal own
        room.check(own, _promised(request, limit))
        async for chunk in _pieces(request, limit):
            room.check(own, len(chunk))
            room.held, own = room.held + len(chunk), own + len(chunk)
            yield chunk

    try:
        yield counted()
    finally:
        room.held -= own


def _promised(request: Request, limit: int) -> int:
    """Return the Content-Length, 0 without one. Raises HTTPException 415 and 413: what is never taken must not wait."""
    if (encoding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise HTTPException(415, f"Content-Encoding {encoding[:40]!r}: send the file as it is")
    if (promised := int(request.headers.get("content-length", 0))) > limit:
        raise _too_large()
    return promised


async def _pieces(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
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
