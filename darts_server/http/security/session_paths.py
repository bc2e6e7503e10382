"""Give the turns of a session their usual routes: a session's base URL has vLLM's generation routes below it."""

import re

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

TURN_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/inference/v1/generate",
        "/tokenize",
        "/detokenize",
    }
)
"""Routes that a session's URL and a session's key open."""
SESSIONS = "/darts/v1/sessions/"
SESSION_KEY = "darts_session"
"""Key of a request's state with the id of the session that its URL names."""
_PATH = re.compile(re.escape(SESSIONS) + r"([^/:]+)(/.+)")


class SessionPaths:
    """ASGI middleware that passes ``/darts/v1/sessions/ID/v1/…`` on as ``/v1/…``, with the id in the state."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = get_route_path(scope)
            match = _PATH.fullmatch(path)
            if match is not None and match[2] in TURN_PATHS:
                root = scope["path"].removesuffix(path)
                state = {**scope.get("state", {}), SESSION_KEY: match[1]}
                scope = {**scope, "path": root + match[2], "raw_path": (root + match[2]).encode(), "state": state}
        await self._app(scope, receive, send)
