"""An ingress as an ASGI app of Ray Serve."""

from contextlib import AsyncExitStack
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from darts_server.exceptions import ServerStopping
from darts_server.ingress.process import make_app, make_fleet, raise_file_limit
from darts_server.ingress.replicas.http import HttpReplica
from darts_server.ingress.replicas.listed import ListServers, following
from darts_server.ingress.settings import IngressSettings
from darts_server.serving.lifecycle import RETRY_SECONDS, Lifecycle


class Gateway:
    """The ingress, from Ray Serve's startup event to its shutdown event."""

    def __init__(self, list_servers: ListServers, settings: IngressSettings) -> None:
        self._lifecycle = Lifecycle()
        self._fleet = make_fleet(settings, [])
        self._following = following(self._fleet, list_servers, HttpReplica, settings.poll_interval)
        self._app: ASGIApp = make_app(self._fleet, settings, self._lifecycle)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        raise_file_limit()
        await receive()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._fleet.polled())
            await stack.enter_async_context(self._following)
            await send({"type": "lifespan.startup.complete"})
            await receive()
            self._lifecycle.stop(ServerStopping("the ingress is stopping; send this to another one", RETRY_SECONDS))
        await send({"type": "lifespan.shutdown.complete"})


def list_through(directory: Any) -> ListServers:
    """Return a function that reads the addresses of all servers. ``directory``: the handle of the `Directory`."""

    async def list_servers() -> list[str]:
        urls: list[str] = await directory.urls.remote()
        return urls

    return list_servers
