"""Web pages: jobs, a job, a kernel, and a form that posts a matrix, rendered on the server.

A small script (static/live.js) follows a job's events and takes the news from the same page; without it, a link does.
Files that a page loads have their content's hash in the name and are cached forever by the browser; nothing is
inline. The page of the OpenAPI is Swagger UI, whose files the package fastapi-offline ships.
"""

import hashlib
import re
from asyncio import to_thread
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lospmm.errors import LospmmError
from lospmm.problem.device import USUAL_DEVICE
from lospmm.settings import settings
from lospmm.tuning.options import CHOICES, FAMILY_NAMES
from lospmm_server import manual, problems
from lospmm_server.forms import Query as FormQuery
from lospmm_server.forms import received_form
from lospmm_server.kernel_view import KernelView, compared, speedup_scale, view_kernel
from lospmm_server.negotiation import negotiate
from lospmm_server.queries import JobRow
from lospmm_server.responses import CACHE_CONTROL
from lospmm_server.schemas import DIGEST_PATTERN, JobState, KernelQuery, ModelQuery, Problem
from lospmm_server.uploads import Received, has_gpu, offered_devices
from lospmm_server.views import View

STATES = tuple(map(str, JobState))

_FOLDER = Path(__file__).parent
_HTML = "text/html"

#: What the forms call the values of the option ``trials``.
TRIALS_IN_WORDS: Mapping[str, str] = {"full": "kernels", "proxy": "proxies, then the best kernels"}

#: Files that pages load.
MEDIA_TYPES: Mapping[str, str] = {
    "page.css": "text/css",
    "live.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "docs.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
}

#: Hexadecimal digits of a file's hash in its name.
HASH_DIGITS = 16

#: Headers of every page: it loads only our own files, and cannot be framed. Swagger UI's CSS has images in it.
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Vary": "Accept",
}

#: Kinds of server-sent events (``api_jobs``) after which a page is reloaded.
KINDS = ("queued", "running", "progress", "kept", "succeeded", "failed", "cancelled", "state")

_DIGEST = re.compile(DIGEST_PATTERN)


#: Errors of a form, and those of their answers that its user can mend in it.
REFUSALS = (LospmmError, HTTPException, RequestValidationError)
TYPED_AGAIN = (400, 422, 429)


@dataclass(frozen=True, slots=True)
class RefusedForm:
    """A form that was refused."""

    form: str
    problem: Problem
    typed: Mapping[str, str]

    def value(self, form: str, field: str) -> str:
        """Return what was typed in a field, if it is one of this form."""
        return self.typed.get(field, "") if form == self.form else ""


@dataclass(frozen=True, slots=True)
class Asset:
    """A file that pages load."""

    url: str
    content: bytes
    media_type: str


class Pages:
    """Templates and the files that they load, read once."""

    def __init__(self) -> None:
        self.assets = {name: _asset(name, media_type) for name, media_type in MEDIA_TYPES.items()}
        self._templates = Environment(
            loader=FileSystemLoader(_FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals["asset"] = lambda name: self.assets[name].url

    def page(self, request: Request, template: str, status: int = 200, **content: Any) -> Response:
        """Render a template."""
        fixed = {"path": request.url.path, "version": request.app.version}
        text = self._templates.get_template(template).render(**fixed, **content)
        return Response(text, status, HEADERS, _HTML)

    def error(self, request: Request, problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
        """Render a problem as a page."""
        response = self.page(request, "error.html", problem.status, title=problem.title, problem=problem)
        response.headers.update(problems.headers_of(problem, headers))
        return response


def pages_router(pages: Pages, view: View) -> APIRouter:
    """Return the routes of pages, which are not part of the OpenAPI."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def get_jobs(
        request: Request, state: str = "", cursor: Annotated[int | None, Query(ge=0, lt=2**63)] = None
    ) -> Response:
        if state and state not in STATES:
            raise HTTPException(404, f"no job has such a state; there are {', '.join(STATES)}")
        found = await view.jobs(request, state or None, cursor)
        return await to_thread(_jobs_page, pages, request, *found, {"state": state, "cursor": cursor})

    @router.post("/jobs")
    async def post_job(request: Request) -> Response:
        return await _posted(pages, request, view, "matrix", KernelQuery, view.submit)

    @router.post("/models")
    async def post_model(request: Request) -> Response:
        return await _posted(pages, request, view, "model", ModelQuery, view.submit_model)

    @router.post("/jobs/{job}/cancel")
    async def cancel_job(request: Request, job: str) -> Response:
        await view.cancel(request, _checked(job))
        return RedirectResponse(f"/jobs/{job}", 303)

    @router.get("/jobs/{job}")
    async def get_job(request: Request, job: str) -> Response:
        found = await view.job(request, _checked(job))
        is_kernel = found.kind == "kernel" and found.state == JobState.SUCCEEDED
        kernel = await to_thread(view_kernel, job, await view.kernel(request, job)) if is_kernel else None
        return await to_thread(_job_page, pages, request, found, kernel)

    @router.get("/kernels/{digest}")
    async def get_kernel(request: Request, digest: str) -> Response:
        kernel = await to_thread(view_kernel, digest, await view.kernel(request, _checked(digest)))
        return await to_thread(pages.page, request, "kernel.html", title=f"Kernel {digest[:12]}", kernel=kernel)

    @router.get("/kernels/{digest}/beside")
    async def get_two_kernels(request: Request, digest: str, other: str) -> Response:
        both = [await to_thread(view_kernel, one, await view.kernel(request, _checked(one))) for one in (digest, other)]
        rows = compared(*both)
        return await to_thread(pages.page, request, "compare.html", title="Two kernels", kernels=both, rows=rows)

    @router.get("/manual/{name:path}")
    async def get_manual(request: Request, name: str) -> Response:
        return await to_thread(_manual_page, pages, request, name or manual.INDEX)

    @router.get("/docs")
    async def get_docs(request: Request) -> Response:
        return pages.page(request, "docs.html")

    @router.get("/static/{name}")
    async def get_asset(name: str) -> Response:
        return _sent(pages, name)

    return router


def _sent(pages: Pages, name: str) -> Response:
    asset = next((asset for asset in pages.assets.values() if asset.url == f"/static/{name}"), None)
    if asset is None:
        raise HTTPException(404, "there is no such file; load the page again")
    headers = {"Cache-Control": CACHE_CONTROL, "X-Content-Type-Options": "nosniff"}
    return Response(asset.content, 200, headers, asset.media_type)


def error_handler(pages: Pages) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return ``problems.handle``, with errors as pages for people."""

    async def handle(request: Request, error: Exception) -> Response:
        if not wants_page(request):
            return await problems.handle(request, error)
        return pages.error(request, problems.describe(error), getattr(error, "headers", None))

    return handle


def wants_page(request: Request) -> bool:
    """Return whether an error is for people: a browser asked, and not for the REST interface."""
    if request.url.path.startswith("/v1/"):
        return False
    try:
        return negotiate(",".join(request.headers.getlist("accept")), (problems.MEDIA_TYPE, _HTML)) == _HTML
    except HTTPException:
        return False


def _asset(name: str, media_type: str) -> Asset:
    folder = files("fastapi_offline") if name.startswith("swagger-ui") else _FOLDER
    content = (folder / "static" / name).read_bytes()
    stem, _, suffix = name.rpartition(".")
    return Asset(f"/static/{stem}.{hashlib.sha256(content).hexdigest()[:HASH_DIGITS]}.{suffix}", content, media_type)


def _checked(digest: str) -> str:
    """Return a digest. Raises HTTPException 404 for what can be none."""
    if not _DIGEST.fullmatch(digest):
        raise HTTPException(404, f"{digest[:80]}: is not the id of a job, which has 64 hexadecimal digits")
    return digest


def _job_page(pages: Pages, request: Request, job: JobRow, kernel: KernelView | None) -> Response:
    return pages.page(
        request,
        "job.html",
        title=f"{job.title}: {job.state}",
        job=job,
        summary=_summary(job),
        kinds=" ".join(KINDS),
        scale=speedup_scale([layer.speedup for layer in job.layers]),
        kernel=kernel,
    )


async def _posted(
    pages: Pages,
    request: Request,
    view: View,
    form: str,
    kind: type[FormQuery],
    submit: Callable[[Request, Received, FormQuery], Awaitable[str]],
) -> Response:
    """Submit what a form uploads; return the way to its job, or the form with what is wrong beside it."""
    try:
        async with received_form(request, kind) as upload:
            job = await submit(request, upload.files, upload.query)
    except REFUSALS as error:
        return await _refused(pages, request, view, form, error)
    return RedirectResponse(f"/jobs/{job}", 303)


async def _refused(pages: Pages, request: Request, view: View, form: str, error: Exception) -> Response:
    """Return the page of a form with what is wrong beside it, and what was typed in it."""
    problem = problems.describe(error)
    if not wants_page(request) or problem.status not in TYPED_AGAIN:
        raise error
    found = await view.jobs(request, None, None)
    asked = {"state": "", "cursor": None}
    refused = RefusedForm(form, problem, getattr(request.state, "typed", {}))
    return await to_thread(_jobs_page, pages, request, *found, asked, refused)


def _manual_page(pages: Pages, request: Request, name: str) -> Response:
    file = manual.files().get(name)
    if file is None:
        raise HTTPException(404, f"{name[:80]}: no page of the manual; /manual/ lists them")
    if file.suffix != ".md":
        return FileResponse(file, headers={"X-Content-Type-Options": "nosniff"})
    text = file.read_text()
    content = Markup(manual.html_of(name, text))
    return pages.page(request, "manual.html", title=manual.title_of(text), content=content)


def _jobs_page(
    pages: Pages,
    request: Request,
    jobs: Sequence[JobRow],
    following: int | None,
    asked: Mapping[str, Any],
    refused: RefusedForm | None = None,
) -> Response:
    pending = sum(not job.is_ended for job in jobs)
    own = [("auto", "the GPU of the service")] if has_gpu() else []
    return pages.page(
        request,
        "jobs.html",
        200 if refused is None else refused.problem.status,
        title="Jobs",
        refused=refused,
        families=[("all", "all"), *((name, name) for name in FAMILY_NAMES)],
        jobs=jobs,
        filters=("", *STATES),
        state=asked["state"],
        summary=f"{len(jobs)} shown, {pending} of them not done yet.",
        pending=pending,
        here=_url(**asked),
        following=following and _url(**{**asked, "cursor": following}),
        is_later=asked["cursor"] is not None,
        devices=own + [(device.name, device.title) for device in offered_devices()],
        usual="" if own else USUAL_DEVICE,
        max_n=settings().max_n,
        trials=own and list(TRIALS_IN_WORDS.items()),
        dtypes=[(name, name) for name in CHOICES["dtype"]],
        values=[(name, "the type of B and C" if name == "dtype" else name) for name in CHOICES["values"]],
    )


def _url(**parameters: Any) -> str:
    query = urlencode({name: value for name, value in parameters.items() if value not in ("", None)})
    return f"/?{query}" if query else "/"


def _summary(job: JobRow) -> str:
    """Return one line for screens and screen readers; it changes with the stage, not with every unit."""
    doing = f": {job.stage.replace('_', ' ')}" if job.stage and job.state == JobState.RUNNING else ""
    layers = f", {job.progress['layers'][0]} of {job.progress['layers'][1]} layers" if "layers" in job.progress else ""
    return f"{job.state.capitalize()}{doing}{layers}."
