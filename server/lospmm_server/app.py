"""The application: routes, error handlers and the life of the service behind them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from lospmm.errors import LospmmError
from lospmm.version import __version__
from lospmm_server import api, api_health, api_jobs, api_models, keys
from lospmm_server.access import ObservedApp
from lospmm_server.origin import refuse_foreign_pages
from lospmm_server.pages import Pages, error_handler, pages_router
from lospmm_server.routing import check_parameters
from lospmm_server.service import SMALL_BYTES, Service
from lospmm_server.service_view import ServiceView
from lospmm_server.uploads import UploadRoom

#: The routes of programs, which OpenAPI and docs/rest.md describe. Those of probes ignore a query.
STRICT_ROUTERS = (api.router, api_models.router, api_jobs.router)
ROUTERS = (*STRICT_ROUTERS, api_health.router)

#: Routes without a key: of probes, and the description of the service with what it loads.
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/docs"})
OPEN_FILES = "/static/"


def create_app(service: Service) -> FastAPI:
    """Return the application on ``service``, which is closed when the application ends."""

    @asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        async with service.life():
            yield

    app = ObservedApp(
        service.metrics,
        title="lospmm",
        version=__version__,
        description="A pruned weight matrix comes in, a fully unrolled SpMM kernel for one GPU goes out.",
        lifespan=life,
        docs_url=None,  # ``pages`` has it, without files of other sites
        redoc_url=None,
        redirect_slashes=False,  # to the host that the client named, whatever it is
        dependencies=[Depends(_admit), Depends(_check_quota)],
    )
    app.state.service, app.state.uploads = service, UploadRoom()
    pages = Pages()
    described = [] if service.keyring is None else [Security(scheme) for scheme in keys.SCHEMES]
    for router in ROUTERS:
        checks = [Depends(check_parameters)] if router in STRICT_ROUTERS else []
        app.include_router(router, dependencies=[*described, *checks])
    app.include_router(pages_router(pages, ServiceView(service)))
    for error in (LospmmError, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(error, error_handler(pages))
    return app


async def _admit(request: Request) -> None:
    """Check the caller.

    Raises HTTPException 401 if a key is needed, 403 for pages of others, 400 for two lengths; TooManyGuesses.
    """
    if {"content-length", "transfer-encoding"} <= set(request.headers):  # a proxy may have believed the other one
        why = "the body has two lengths: send Content-Length or Transfer-Encoding"
        raise HTTPException(400, why, {"Connection": "close"})
    service: Service = request.app.state.service
    refuse_foreign_pages(request, is_open=service.keyring is None)
    request.state.caller = keys.NOBODY
    path = request.url.path
    if service.keyring is None or path in OPEN_PATHS or path.startswith(OPEN_FILES):
        return
    if service.keyring.is_stale:
        await service.ask(service.keyring.refresh)
    key = keys.key_of(request)
    caller = None if key is None else service.keyring.caller_of(key)
    if caller is None:
        if key is not None:
            request.state.has_wrong_key = True
            service.keyring.guesses.add(request.client.host if request.client else "")
        raise keys.refused()
    keys.check_scope(request, caller)
    request.state.caller = caller


async def _check_quota(request: Request) -> None:
    """Refuse a large body unread where no job would be taken. Raises Busy.

    Smaller ones are read all the same: they may ask for what is known.
    """
    if request.method == "POST" and int(request.headers.get("content-length", 0)) > SMALL_BYTES:
        await request.app.state.service.check_quota(request.state.caller.name)
