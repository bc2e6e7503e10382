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
            turn = None if match is None else _turn_path(match[2])
            if match is not None and turn is not None:
                turn = scope["path"].removesuffix(path) + turn
                state = {**scope.get("state", {}), SESSION_KEY: match[1]}
                scope = {**scope, "path": turn, "raw_path": turn.encode(), "state": state}
        await self._app(scope, receive, send)


def _turn_path(path: str) -> str | None:
    """Return the route of a turn, or None. A base URL ends with ``/v1``, and some routes do not begin with it."""
    for each in (path, path.removeprefix("/v1")):
        if each in TURN_PATHS:
            return each
    return None
