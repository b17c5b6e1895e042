"""The HTTP server: uvicorn, with limits on connections, and an end at which waiting requests are answered."""

import asyncio
import resource
import socket
from collections.abc import Callable
from functools import partial

import uvicorn

from lospmm.errors import ServiceFault
from lospmm_server.app import create_app
from lospmm_server.connections import ACCEPTED_AT_ONCE, Door, GuardedConnection, most_connections
from lospmm_server.service import Service

#: Seconds that an orderly end waits for uploads and answers in progress.
LEAVE_SECONDS = 3

#: Connections that the system keeps until they are accepted.
BACKLOG = 2048


class Server(uvicorn.Server):
    """The HTTP server of a service; waiting requests get their answer when it stops."""

    def __init__(self, service: Service, announce: Callable[[], None] = lambda: None) -> None:
        self._door = Door(most_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
        config = uvicorn.Config(
            create_app(service),
            http=partial(GuardedConnection, self._door),  # type: ignore[arg-type]  # it is called, and no more
            backlog=ACCEPTED_AT_ONCE,
            timeout_graceful_shutdown=LEAVE_SECONDS,
            log_config=None,
            access_log=False,
        )
        super().__init__(config)
        self._service, self._announce = service, announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with room for those that are not accepted at once, and say so. Raises ServiceFault."""
        asyncio.get_running_loop().set_exception_handler(self._door.report)
        try:
            await super().startup(sockets)
        except SystemExit:  # with a status of uvicorn's own
            raise ServiceFault("the service could not start: the log says why") from None
        for listener in sockets or ():
            listener.listen(BACKLOG)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wake waiting requests before the connections are closed: they get their answer at once."""
        self._service.stop()
        await super().shutdown(sockets)
