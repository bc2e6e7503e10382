"""The response header that has the id of the groups in a response."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from darts_server.identifiers import header_value

GROUP_ID = "X-Darts-Group-Id"
STATE_KEY = "darts_group_id"
"""Attribute of a request's state that holds the id, if the request was shaped."""


class GroupIdHeader:
    """ASGI middleware that adds `GROUP_ID` to responses of shaped requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start" and (group_id := scope.get("state", {}).get(STATE_KEY)):
                MutableHeaders(scope=message)[GROUP_ID] = header_value(group_id)
            await send(message)

        await self._app(scope, receive, send_with_header if scope["type"] == "http" else send)
