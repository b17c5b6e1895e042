"""The forms of the page, of a matrix and of a model with a layer table, with limits as in ``uploads``."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile

from lospmm.settings import settings
from lospmm_server.schemas import KernelQuery, ModelQuery
from lospmm_server.uploads import FIELD, FORM_BYTES, TABLE_FIELD, Received, form_of

Query = TypeVar("Query", KernelQuery, ModelQuery)

#: Fields beside the files, at most.
MAX_FIELDS = 7


@dataclass(frozen=True, slots=True)
class UploadForm(Generic[Query]):
    """Uploaded files and their parameters."""

    files: Received
    query: Query


@asynccontextmanager
async def received_form(request: Request, kind: type[Query]) -> AsyncIterator[UploadForm[Query]]:
    """Yield the form with the parameters ``kind``; what is left empty is as by default.

    What was typed is in ``request.state.typed`` as soon as it is read, for a page that says what is wrong with it.
    Raises HTTPException 400, 408, 413, 503; RequestValidationError for its fields.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise HTTPException(400, "expected the form of the page, as multipart/form-data")
    files = (FIELD, TABLE_FIELD) if kind is ModelQuery else (FIELD,)
    limit = settings().max_upload_bytes + FORM_BYTES
    async with form_of(request, limit, max_files=len(files), max_fields=MAX_FIELDS) as form:
        request.state.typed = {name: value for name, value in form.multi_items() if isinstance(value, str)}
        found = [_upload(form, field) for field in files]
        if found[0] is None:
            raise HTTPException(400, "no file was chosen; choose one")
        yield UploadForm(Received([found[0]], table=found[1] if len(found) > 1 else None), _query(form, files, kind))


def _upload(form: FormData, field: str) -> UploadFile | None:
    upload = form.get(field)
    return upload if isinstance(upload, UploadFile) and upload.filename else None


def _query(form: FormData, files: tuple[str, ...], kind: type[Query]) -> Query:
    values = {name: value for name, value in form.multi_items() if name not in files and value != ""}
    try:
        return kind.model_validate({**values, "wait": 0.0})
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
