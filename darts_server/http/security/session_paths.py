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
"""Key in a request's state: the id of the session that its URL names."""
_PATH = re.compile(re.escape(SESSIONS) + r"([^/:]+)(/.+)")


class SessionPaths:
    """ASGI middleware that passes ``/darts/v1/sessions/ID/v1/…`` on as ``/v1/…``, with the id in the state."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = get_route_path(scope)
            match = _PATH.fullmatch(path)
            turn_path = None if match is None else _find_turn_path(match[2])
            if match is not None and turn_path is not None:
                # Under --root-path, the scope's path has a prefix that the routes do not have.
                new_path = scope["path"].removesuffix(path) + turn_path
                state = {**scope.get("state", {}), SESSION_KEY: match[1]}
                scope = {**scope, "path": new_path, "raw_path": new_path.encode(), "state": state}
        await self._app(scope, receive, send)


def _find_turn_path(path: str) -> str | None:
    # A session's base URL ends with /v1, and some routes, such as /tokenize, do not begin with it.
    for candidate in (path, path.removeprefix("/v1")):
        if candidate in TURN_PATHS:
            return candidate
    return None
