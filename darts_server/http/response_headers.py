"""Response headers: the id of the groups in a response, and on ``/health`` which weights are served."""

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping

from starlette._utils import get_route_path
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from darts_server.identifiers import header_value

GROUP_ID = "X-Darts-Group-Id"
STATE_KEY = "darts_group_id"
"""Attribute of a request's state that holds the id, if the request was shaped."""
WEIGHTS = "X-Darts-Weights"
HEALTH = "/health"


class GroupIdHeader:
    """ASGI middleware that adds the groups' id to responses of shaped requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start" and (group_id := scope.get("state", {}).get(STATE_KEY)):
                MutableHeaders(scope=message)[GROUP_ID] = header_value(group_id)
            await send(message)

        await self._app(scope, receive, send_with_header if scope["type"] == "http" else send)


class WeightsHeader:
    """ASGI middleware that adds to ``/health``: ``start=…; version=…; source=…; loras=…``.

    ``start`` is another one after each restart. ``source`` is ``start`` for the weights that the server was started
    with, and ``update`` for others. ``loras`` differs between servers whose LoRA adapters differ in their names or
    versions.

    Args:
        version: returns that of the model's weights.
        are_initial: returns whether they are those of the start.
        loras: returns the versions of the LoRA adapters, by their names.
    """

    def __init__(
        self,
        app: ASGIApp,
        version: Callable[[], int],
        are_initial: Callable[[], bool],
        loras: Callable[[], Mapping[str, int]],
    ) -> None:
        self._app = app
        self._version = version
        self._are_initial = are_initial
        self._loras = loras
        self._start = secrets.token_hex(8)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[WEIGHTS] = self._value()
            await send(message)

        is_health = scope["type"] == "http" and get_route_path(scope) == HEALTH
        await self._app(scope, receive, send_with_header if is_health else send)

    def _value(self) -> str:
        loras = sorted(self._loras().items())
        digest = hashlib.sha256(json.dumps(loras).encode()).hexdigest()[:16] if loras else "none"
        source = "start" if self._are_initial() else "update"
        return f"start={self._start}; version={self._version()}; source={source}; loras={digest}"
