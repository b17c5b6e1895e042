"""HEAD requests, as of load balancers: the answer to GET without its body (RFC 9110, section 9.3.2)."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Heads:
    """ASGI middleware that turns HEAD into GET, so that routes and OpenAPI need not know of HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        inside = {**scope, "method": "GET"}  # uvicorn has its own scope, and sends no body to HEAD

        async def answer(message: Message) -> None:
            """End the answer with its head: for the app, the client of an endless answer is then gone."""
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})

        try:
            await self._app(inside, receive, answer)
        finally:
            if "route" in inside:  # for log and metrics, which are outside of this middleware
                scope["route"] = inside["route"]
