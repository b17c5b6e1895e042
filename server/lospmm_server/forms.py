"""The form of the page: a matrix file with fields for n and the device, with limits as in ``uploads``."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile

from lospmm.settings import settings
from lospmm_server.schemas import KernelQuery
from lospmm_server.uploads import FIELD, FORM_BYTES, body_within, form_of

#: Fields beside the file.
FIELDS = ("n", "device")


@dataclass(frozen=True, slots=True)
class UploadForm:
    """An uploaded matrix and its parameters."""

    upload: UploadFile
    query: KernelQuery


@asynccontextmanager
async def received_form(request: Request) -> AsyncIterator[UploadForm]:
    """Yield the form. Raises HTTPException 400, 408, 413, 503; RequestValidationError for its fields."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise HTTPException(400, "expected the form of the page, as multipart/form-data")
    body = body_within(request, settings().max_upload_bytes + FORM_BYTES)
    form = await form_of(request.headers, body, max_files=1, max_fields=len(FIELDS))
    try:
        yield UploadForm(_upload(form), _query(form))
    finally:
        await form.close()


def _upload(form: FormData) -> UploadFile:
    upload = form.get(FIELD)
    if not isinstance(upload, UploadFile) or not upload.filename:
        raise HTTPException(400, "no matrix file was chosen; go back and choose one")
    return upload


def _query(form: FormData) -> KernelQuery:
    values = {name: value for name, value in form.multi_items() if name != FIELD}
    try:
        return KernelQuery.model_validate({**values, "wait": 0.0})
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
