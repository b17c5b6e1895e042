"""Routes for operators: health, readiness, metrics."""

from typing import Any

from fastapi import APIRouter, HTTPException
from fastapi.responses import Response

from lospmm_server.metrics import MEDIA_TYPE
from lospmm_server.readiness import reasons_not_ready
from lospmm_server.routing import problems_of
from lospmm_server.schemas import Health
from lospmm_server.service import Behind

#: Probes have no key.
_OPEN: dict[str, Any] = {"security": [{}]}

router = APIRouter(tags=["health"])


@router.get("/healthz", openapi_extra=_OPEN, response_model=Health, responses=problems_of(403))
async def get_health() -> Health:
    """Say that the process answers."""
    return Health(status="ok")


@router.get("/readyz", openapi_extra=_OPEN, response_model=Health, responses=problems_of(403, 503))
async def get_readiness(behind: Behind) -> Health:
    """Say whether a job could be taken and tuned now; 503 says why not."""
    reasons = await behind.ask(reasons_not_ready, behind.shelf.disk, behind.database)
    if behind.is_stopping:
        reasons = ["the service is stopping"]
    if reasons:
        raise HTTPException(503, "; ".join(reasons))
    return Health(status="ready")


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "For Prometheus."}, **problems_of(401, 403, 503)},
)
async def get_metrics(behind: Behind) -> Response:
    """Return counters, times and the queue, as Prometheus reads them."""
    return Response(await behind.render_metrics(), media_type=MEDIA_TYPE)
