"""Response header of ``/health`` that says which weights are served."""

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping

from starlette._utils import get_route_path
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Darts-Weights"
PATH = "/health"


class WeightsHeader:
    """ASGI middleware that adds the header: ``start=…; version=…; source=…; loras=…``.

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
                MutableHeaders(scope=message)[HEADER] = self._value()
            await send(message)

        is_health = scope["type"] == "http" and get_route_path(scope) == PATH
        await self._app(scope, receive, send_with_header if is_health else send)

    def _value(self) -> str:
        loras = sorted(self._loras().items())
        digest = hashlib.sha256(json.dumps(loras).encode()).hexdigest()[:16] if loras else "none"
        source = "start" if self._are_initial() else "update"
        return f"start={self._start}; version={self._version()}; source={source}; loras={digest}"
