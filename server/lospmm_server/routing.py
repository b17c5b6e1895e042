"""Shared parts of routes: their parameters, and how OpenAPI describes bodies and problems."""

import difflib
from collections import Counter
from typing import Annotated, Any, cast

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError

from lospmm_server import problems
from lospmm_server.keys import Caller
from lospmm_server.negotiation import negotiate
from lospmm_server.responses import BINARY, JSON
from lospmm_server.uploads import BIAS_FIELD, FIELD, MAX_LAYERS, TABLE_FIELD

FILE = {"type": "string", "format": "binary"}


def body(description: str, *, several: bool = False, bias: bool = False) -> dict[str, Any]:
    """Return the OpenAPI of a body: a file, or a form with one, or with several and a layer table.

    With ``bias`` there may be one beside each.
    """
    files = {"type": "array", "items": FILE, "maxItems": MAX_LAYERS}
    fields = {FIELD: {**files, "minItems": 1} if several else FILE}
    if bias:
        fields[BIAS_FIELD] = files if several else FILE
    if several:
        fields[TABLE_FIELD] = FILE
    form = {"schema": {"type": "object", "properties": fields, "required": [FIELD]}}
    content = {"multipart/form-data": form, BINARY: {"schema": FILE}}
    return {"requestBody": {"required": True, "description": description, "content": content}}


def problems_of(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI of the problems that a route may answer with; one that has keys may also see wrong ones."""
    statuses = (*statuses, 429) if 401 in statuses and 429 not in statuses else statuses
    kinds = (*problems.ERRORS.values(), *problems.STATUSES.values(), problems.BAD_PARAMETER)
    titles = {kind.status: kind.title for kind in kinds}
    content = {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": titles.get(status, "A problem"), "content": content} for status in statuses}


async def _media_type(request: Request) -> str:
    return negotiate(",".join(request.headers.getlist("accept")), (JSON, BINARY))


async def _caller(request: Request) -> Caller:
    return cast(Caller, request.state.caller)


async def check_parameters(request: Request) -> None:
    """Raise RequestValidationError for a misspelt or repeated parameter of the query."""
    given = Counter(name for name, _ in request.query_params.multi_items())
    if not given:
        return
    operation = request.app.openapi()["paths"][request.scope["route"].path][request.method.lower()]
    known = [found["name"] for found in operation.get("parameters", ()) if found["in"] == "query"]
    faults = dict.fromkeys((name for name in given if name not in known), "there is no such parameter")
    for name in list(faults)[: problems.NAMED_PARAMETERS]:  # only these are shown
        if close := difflib.get_close_matches(name[:80], known, n=1):
            faults[name] += f" (did you mean {close[0]}?)"
    faults |= {name: "is given more than once" for name, times in given.items() if name in known and times > 1}
    if faults:
        raise RequestValidationError([{"loc": ("query", name), "msg": fault} for name, fault in faults.items()])


MediaType = Annotated[str, Depends(_media_type)]
By = Annotated[Caller, Depends(_caller)]
