"""HEAD: what GET would answer, without the body (RFC 9110, section 9.3.2). Load balancers and probes ask so."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Heads:
    """ASGI middleware: what is inside answers GET. The routes, and what OpenAPI says of them, need not know of HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        inside = {**scope, "method": "GET"}  # the server looks at its own: an answer to HEAD has no body

        async def answer(message: Message) -> None:
            """The answer ends with its head: the client of an endless one, as of events, is then gone."""
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})

        try:
            await self._app(inside, receive, answer)
        finally:
            if "route" in inside:  # for the log and the metrics, which are outside
                scope["route"] = inside["route"]
