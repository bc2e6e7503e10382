"""Check every request to vLLM's routes and ours: API keys, body limits, shutdown, and the form of errors."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette._utils import get_route_path
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.routing import Match, compile_path
from starlette.status import WS_1008_POLICY_VIOLATION
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from darts_server.caller import Caller, caller
from darts_server.exceptions import (
    DartsError,
    EngineDead,
    Forbidden,
    InvalidRequest,
    QuotaReached,
    ServerStopping,
    TooLarge,
    Unauthorized,
)
from darts_server.http.body import BodyLimits, IncompleteBody, limit_receive
from darts_server.http.errors import error_fields, headers_of, status_of
from darts_server.http.security.access import Access, RouteAccess, Sender
from darts_server.http.security.route_table import ANY, OWN_LIMITS, TABLE
from darts_server.http.security.session_paths import SESSION_KEY, SESSIONS, TURN_PATHS
from darts_server.identifiers import NAME_CHARS, encode_for_header, replace_unprintable
from darts_server.serving.lifecycle import Lifecycle

METHODS_WITHOUT_WORK = ("GET", "HEAD", "DELETE")
HEALTH = ("/health", "/ping")
FORWARDED = (b"forwarded", b"via", b"x-real-ip", b"x-forwarded-")
"""Prefixes of the headers that proxies add to a request."""
REWARDS = "/darts/v1/rewards"
SESSION_END = re.compile(re.escape(SESSIONS) + "[^/]+:end")
GROUP_ID = "X-Darts-Group-Id"
SESSION_HEADER = "X-Darts-Session"
SESSION_STATE_KEY = "darts_session_state"
"""Key in a request's state: the state of the session."""
MAX_CLOSE_REASON = 123
"""Bytes that a WebSocket may give as the reason for its end (RFC 6455, 5.5)."""
GROUP_STATE_KEY = "darts_group_id"
"""Key in a request's state: the id of its groups, if the request was shaped."""

# Compiled as by the router, so that no spelling of a path matches another route there.
_ROUTES = [
    (compile_path(template)[0], frozenset(methods.split()), access, template)
    for access, routes in TABLE.items()
    for template, methods in routes.items()
]


FindSessionOfKey = Callable[[bytes], "tuple[str | None, str] | None"]
"""Returns the owner and the id of the session that a key belongs to, or None. Raises `Unauthorized` for a key of a
session that is dropped."""


@dataclass(frozen=True, slots=True)
class SecurityMiddleware:
    """ASGI middleware that refuses requests in OpenAI's error form, and sets the header `GROUP_ID` of answers."""

    app: ASGIApp
    access: Access
    limits: BodyLimits
    """Limits of request bodies, except on the routes in `OWN_LIMITS`."""
    on_refusal: Callable[[str], None]
    """Called with the reason of each refusal."""
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    access_overrides: Mapping[tuple[str, str], RouteAccess] = field(default_factory=dict)
    """Access by method and path, instead of that in the route table."""
    find_session_of_key: FindSessionOfKey = lambda _: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Browsers send OPTIONS before a request with a key, and no route acts on it.
        if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
            await self.app(scope, receive, send)
            return

        # Refuse callers without access, and requests for work while the server stops.
        lifecycle = self.lifecycle
        method = scope.get("method", "WEBSOCKET")
        path = get_route_path(scope)
        starts_work = method not in METHODS_WITHOUT_WORK
        access, has_own_limits = find_route_access(method, path)
        access = self.access_overrides.get((method, path)) or access
        try:
            request_caller = self._check_access(scope, method, path, access)
            # Harnesses may still report results, but a load balancer must see that the server stops.
            reports_result = path == REWARDS or SESSION_END.fullmatch(path) is not None
            if lifecycle.stop_reason is not None and (path in HEALTH or (starts_work and not reports_result)):
                # With its traceback, the exception would keep every refused request alive.
                raise lifecycle.stop_reason.with_traceback(None)
        except DartsError as error:
            await self._refuse(error, scope, receive, send)
            return

        if scope["type"] == "http" and not has_own_limits:
            receive = limit_receive(scope, receive, self.limits, request_caller)

        # Replace a route's error response if our exception is its cause. A response in which the route has answered our
        # exception itself only gets the exception's headers.
        is_replaced = False

        async def send_replaced(message: Message) -> None:
            nonlocal is_replaced
            if message["type"] == "http.response.start":
                status = message["status"]
                error = None
                if request_caller.refusal is not None and status >= HTTPStatus.BAD_REQUEST:
                    error = request_caller.refusal
                elif status == HTTPStatus.INTERNAL_SERVER_ERROR:
                    # While the server stops, a failure is a consequence of the stop.
                    error = lifecycle.stop_reason
                if error is not None:
                    is_replaced = True
                    await self._refuse(error, scope, receive, send)
                    return

                headers = MutableHeaders(scope=message)
                state = scope.get("state", {})
                group_id = state.get(GROUP_STATE_KEY)
                if group_id:
                    headers[GROUP_ID] = encode_for_header(group_id)
                if SESSION_STATE_KEY in state:
                    headers[SESSION_HEADER] = state[SESSION_STATE_KEY]
                if request_caller.answered_error is not None:
                    headers.update(headers_of(request_caller.answered_error))
            if not is_replaced:
                await send(message)

        token = caller.set(request_caller)
        lifecycle.requests += starts_work
        try:
            await self.app(scope, receive, send_replaced)
        finally:
            lifecycle.requests -= starts_work
            caller.reset(token)
            # A traceback would keep the request's generators alive, which release their tickets when they are deleted.
            request_caller.refusal = None
            request_caller.answered_error = None

    def _check_access(
        self,
        scope: Scope,
        method: str,
        path: str,
        access: RouteAccess | None,
    ) -> Caller:
        # The first of several headers with the same name counts.
        headers: dict[bytes, bytes] = {}
        is_forwarded = False
        for name, value in scope["headers"]:
            headers.setdefault(name, value)
            is_forwarded = is_forwarded or name.startswith(FORWARDED)

        def text_of(name: bytes) -> str | None:
            return headers[name].decode("latin-1") if name in headers else None

        # A route that is missing in the table is a new route of vLLM, or no route at all.
        if access is None:
            is_route = any(route.matches(scope)[0] is Match.FULL for route in scope["app"].routes)
            access = RouteAccess.ADMIN if is_route else RouteAccess.USE

        key = None
        scheme, _, sent_key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            key = sent_key.strip() or None

        # With --forwarded-allow-ips or FORWARDED_ALLOW_IPS, uvicorn has replaced the client's address by an address in
        # X-Forwarded-For. The header remains, so that address never counts as this machine's.
        address = scope["client"][0] if scope.get("client") else ""
        sender = Sender(address, text_of(b"host"), text_of(b"origin"), is_forwarded)

        session_of_url = scope.get("state", {}).get(SESSION_KEY)
        session_key = key
        if b"authorization" not in headers:
            # Anthropic's clients send a session's key in this header. Keys of the server are accepted as Bearer alone.
            session_key = headers.get(b"x-api-key")
        owner_and_session = None if session_key is None else self.find_session_of_key(session_key)
        if owner_and_session is None:
            request_caller = self.access.identify_caller(access, f"{method} {path}", key, sender)
            request_caller.session = session_of_url
        else:
            owner, session_of_key = owner_and_session
            if not self.access.may_call(owner):
                raise Unauthorized("the key that has created the session was removed; send another key")
            session_path = SESSIONS + session_of_key
            is_of_session = path == session_path or path.startswith((f"{session_path}:", f"{session_path}/"))
            if not (is_of_session or path in TURN_PATHS) or session_of_url not in (None, session_of_key):
                raise Forbidden("the key of a session is only for its turns, its events and its end")
            request_caller = Caller(owner, session=session_of_key)
        request_id = text_of(b"x-request-id")
        if request_id is not None:
            request_caller.request_id = replace_unprintable(request_id[:NAME_CHARS])
        return request_caller

    async def _refuse(
        self,
        error: DartsError,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self.on_refusal(_metric_label_of(error))
        if scope["type"] == "websocket":
            # A character that is cut in the middle is left out.
            reason = str(error).encode()[:MAX_CLOSE_REASON].decode(errors="ignore")
            await send({"type": "websocket.close", "code": WS_1008_POLICY_VIOLATION, "reason": reason})
            return

        headers = headers_of(error)
        # Otherwise the server would read and discard the rest of the body.
        if isinstance(error, TooLarge | IncompleteBody):
            headers["Connection"] = "close"
        response = JSONResponse({"error": error_fields(error)}, status_code=status_of(error).value, headers=headers)
        await response(scope, receive, send)


def find_route_access(method: str, path: str) -> tuple[RouteAccess | None, bool]:
    """Return the route's access, or ``None`` if the table has no such route, and whether it limits its body itself."""
    # Not cached by path, because callers without a key choose paths of any length.
    method = "GET" if method == "HEAD" else method
    for pattern, methods, access, template in _ROUTES:
        if (method in methods or ANY in methods) and pattern.match(path):
            return access, (method, template) in OWN_LIMITS
    return None, False


def _metric_label_of(error: DartsError) -> str:
    if isinstance(error, Unauthorized):
        return "key"
    if isinstance(error, Forbidden):
        return "permission"
    if isinstance(error, ServerStopping | EngineDead):
        return "shutdown"
    if isinstance(error, InvalidRequest):
        # Other fields request too many candidates.
        return "body" if error.field == "body" else "quota"
    if isinstance(error, QuotaReached):
        return "quota"
    return "queue"
