"""The response header that names the groups a response is made of."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Darts-Group-Id"
STATE_KEY = "darts_group_id"
"""Where in a request's state the id is left by whoever shaped it."""


class GroupIdHeader:
    """ASGI middleware: adds the header to responses of shaped requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and (group_id := scope.get("state", {}).get(STATE_KEY)):
                MutableHeaders(scope=message)[HEADER] = group_id
            await send(message)

        await self._app(scope, receive, sending if scope["type"] == "http" else send)
