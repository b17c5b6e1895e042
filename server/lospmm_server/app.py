"""The application: routes, error handlers and the life of the workshop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from lospmm import __version__
from lospmm.errors import LospmmError
from lospmm_server.api import router
from lospmm_server.origin import refuse_foreign_pages
from lospmm_server.problems import handle
from lospmm_server.workshop import Workshop


def create_app(workshop: Workshop) -> FastAPI:
    """The service on ``workshop``, which is closed when the application ends."""

    @asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await workshop.close()

    app = FastAPI(
        title="lospmm",
        version=__version__,
        description="A pruned weight matrix comes in, a fully unrolled SpMM kernel for one GPU goes out.",
        lifespan=life,
        redoc_url=None,
        dependencies=[Depends(refuse_foreign_pages)],
    )
    app.state.workshop = workshop
    app.include_router(router)
    for error in (LospmmError, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(error, handle)
    return app
