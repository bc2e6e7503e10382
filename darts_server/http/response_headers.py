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


class ResponseHeader:
    """ASGI middleware that adds a header to responses.

    ``value_of``: returns its value when the response to a request begins; ``None`` to leave it out.
    """

    def __init__(self, app: ASGIApp, name: str, value_of: Callable[[Scope], str | None]) -> None:
        self._app = app
        self._name = name
        self._value_of = value_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start" and (value := self._value_of(scope)) is not None:
                MutableHeaders(scope=message)[self._name] = value
            await send(message)

        await self._app(scope, receive, send_with_header if scope["type"] == "http" else send)


def group_id_of(scope: Scope) -> str | None:
    """Return the value of `GROUP_ID`."""
    group_id = scope.get("state", {}).get(STATE_KEY)
    return header_value(group_id) if group_id else None


def weights_of(
    version: Callable[[], int], are_initial: Callable[[], bool], loras: Callable[[], Mapping[str, int]]
) -> Callable[[Scope], str | None]:
    """Return what makes the value of `WEIGHTS`: ``start=…; version=…; source=…; loras=…``.

    ``start`` is another one after each restart. ``source`` is ``start`` for the weights that the server was started
    with, and ``update`` for others. ``loras`` differs between servers whose LoRA adapters differ in their names or
    versions.

    Args:
        version: returns that of the model's weights.
        are_initial: returns whether they are those of the start.
        loras: returns the versions of the LoRA adapters, by their names.
    """
    start = secrets.token_hex(8)

    def value_of(scope: Scope) -> str | None:
        if get_route_path(scope) != HEALTH:
            return None
        named = sorted(loras().items())
        digest = hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16] if named else "none"
        return f"start={start}; version={version()}; source={'start' if are_initial() else 'update'}; loras={digest}"

    return value_of
