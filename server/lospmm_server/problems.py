"""Errors as RFC 9457 problem+json. To add a kind of error, add a row to a table and to docs/rest.md."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Match

from lospmm.errors import (
    BadMatrix,
    BadRequest,
    BadSettings,
    DiskFault,
    GpuFault,
    LospmmError,
    NothingFits,
    ServiceFault,
    ToolchainFault,
    Unsupported,
    VerificationFailed,
)
from lospmm_server.faults import (
    RETRY_SECONDS,
    Busy,
    Cancelled,
    DatabaseFault,
    GaveUp,
    LayersFailed,
    OutOfTime,
    Stopping,
    TooManyGuesses,
)
from lospmm_server.schemas import Problem

MEDIA_TYPE = "application/problem+json"

#: Methods that routes may have.
METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")

#: Wrong parameters that one answer names.
NAMED_PARAMETERS = 5


class ProblemKind(NamedTuple):
    """A kind of problem, with its HTTP status."""

    name: str  # the end of ``type``, /problems/<name>
    title: str
    status: int


#: By the nearest class of an error.
ERRORS: Mapping[type[LospmmError], ProblemKind] = {
    BadMatrix: ProblemKind("bad-matrix", "The matrix file cannot be used", 422),
    Unsupported: ProblemKind("unsupported", "This service does not do that", 400),
    BadSettings: ProblemKind("unavailable", "The service cannot do work now", 503),
    BadRequest: ProblemKind("bad-request", "The request is wrong", 400),
    NothingFits: ProblemKind("nothing-fits", "No kernel fits the request", 422),
    ToolchainFault: ProblemKind("toolchain-fault", "A compiler failed", 500),
    GpuFault: ProblemKind("gpu-fault", "The GPU failed", 500),
    VerificationFailed: ProblemKind("verification-failed", "The kernel computes something else", 500),
    DatabaseFault: ProblemKind("unavailable", "The service cannot do work now", 503),
    DiskFault: ProblemKind("unavailable", "The service cannot do work now", 503),
    ServiceFault: ProblemKind("unavailable", "The service cannot do work now", 503),
    Stopping: ProblemKind("unavailable", "The service cannot do work now", 503),
    TooManyGuesses: ProblemKind("too-many-guesses", "Too many wrong API keys", 429),
    Busy: ProblemKind("busy", "Too many jobs wait already", 429),
    Cancelled: ProblemKind("cancelled", "The job was cancelled", 409),
    GaveUp: ProblemKind("gave-up", "The job ends its workers", 500),
    OutOfTime: ProblemKind("out-of-time", "The job took too long", 500),
    LayersFailed: ProblemKind("layers-failed", "Some layers have no kernel", 500),
}

#: What a parameter with a pattern takes.
FORMS: Mapping[str, str] = {
    "n": "give one or several whole numbers from 1, as 1,8,512",
    "id": "give the 64 hexadecimal digits of a job",
    "digest": "give the 64 hexadecimal digits of a kernel",
    "cursor": "give `next` of the page before",
}

BAD_PARAMETER = ProblemKind("bad-parameter", "A parameter is wrong", 422)
INTERNAL = ProblemKind("internal", "The service is at fault", 500)

#: Reasons and remedies for what the framework refuses without a reason.
REASONS: Mapping[int, str] = {
    404: "nothing has this address; /docs lists the routes",
    405: "this route has other methods, which the header Allow names",
}

#: Kinds of problems that routes and the framework raise by status alone.
STATUSES: Mapping[int, ProblemKind] = {
    kind.status: kind
    for kind in (
        ProblemKind("bad-body", "The body cannot be understood", 400),
        ProblemKind("unauthorized", "An API key is needed", 401),
        ProblemKind("forbidden", "The request is not allowed", 403),
        ProblemKind("not-found", "There is no such thing", 404),
        ProblemKind("method-not-allowed", "The method is not allowed here", 405),
        ProblemKind("not-acceptable", "No accepted media type is available", 406),
        ProblemKind("too-slow", "The body took too long", 408),
        ProblemKind("too-large", "The body is too large", 413),
        ProblemKind("encoded-body", "The body is compressed", 415),
        ProblemKind("unavailable", "The service cannot do work now", 503),
    )
}


def describe(error: BaseException) -> Problem:
    """Return the problem that a client is shown. Unexpected errors keep their message to themselves."""
    match error:
        case LospmmError():
            kind = next((ERRORS[cls] for cls in type(error).__mro__ if cls in ERRORS), INTERNAL)
            return _problem(kind, str(error))
        case RequestValidationError():
            return _problem(BAD_PARAMETER, _wrong_parameters(error))
        case HTTPException() if error.status_code in STATUSES:
            is_bare = error.detail == HTTPStatus(error.status_code).phrase
            detail = REASONS.get(error.status_code, error.detail) if is_bare else error.detail
            return _problem(STATUSES[error.status_code], detail)
        case HTTPException():
            return Problem(type="about:blank", title=error.detail, status=error.status_code, detail=error.detail)
        case ClientDisconnect():  # nobody reads the answer, but it is no fault of ours
            return _problem(STATUSES[400], "the client left before the body was whole")
        case MemoryError():
            return _problem(STATUSES[503], "the service has too little memory for this request now")
        case _:
            return _problem(INTERNAL, "an unexpected error; the log of the service has it")


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """Return a problem as an HTTP answer."""
    return JSONResponse(problem.model_dump(), problem.status, headers_of(problem, headers), MEDIA_TYPE)


def headers_of(problem: Problem, headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return ``headers``, with Retry-After where the same request may be taken later."""
    retry = {"Retry-After": str(RETRY_SECONDS)} if problem.status in (429, 503) else {}
    return retry | dict(headers or {})


async def handle(request: Request, error: Exception) -> Response:
    """Answer any exception that a route raises."""
    headers = getattr(error, "headers", None)
    if isinstance(error, HTTPException) and error.status_code == 204:  # a stream of events with nothing more to say
        return Response(status_code=204)
    if isinstance(error, HTTPException) and error.status_code == 405:
        headers = {"Allow": ", ".join(_methods_of(request))}
    return problem_response(describe(error), headers)


def _methods_of(request: Request) -> list[str]:
    """Return the methods of a request's path; the framework names those of the first route only.

    GET implies HEAD (``heads``).
    """
    routes = request.app.router.routes
    scopes = {method: {**request.scope, "method": "GET" if method == "HEAD" else method} for method in METHODS}
    return [
        method for method, scope in scopes.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)
    ]


def _problem(kind: ProblemKind, detail: str) -> Problem:
    return Problem(type=f"/problems/{kind.name}", title=kind.title, status=kind.status, detail=detail)


def _wrong_parameters(error: RequestValidationError) -> str:
    found = error.errors()
    named = [f"{_place(wrong['loc'])}: {_fault(wrong)}" for wrong in found[:NAMED_PARAMETERS]]
    more = len(found) - len(named)
    return "; ".join([*named, f"and {more} more"] if more else named)


def _fault(wrong: Mapping[str, Any]) -> str:
    form = FORMS.get(str(wrong["loc"][-1])) if wrong.get("type") == "string_pattern_mismatch" else None
    return form or str(wrong["msg"])


def _place(location: tuple[str | int, ...]) -> str:
    return " ".join(str(part) for part in location)[:80]
