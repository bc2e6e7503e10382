"""Check every request, on vLLM's routes and ours: API keys, body limits, shutdown, and the form of errors."""

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
from darts_server.http.body import BodyLimits, IncompleteBody, limited
from darts_server.http.errors import fields_of, headers_of, status_of
from darts_server.http.security.access import Access, RouteAccess, Sender
from darts_server.http.security.route_table import ANY, OWN_LIMITS, TABLE
from darts_server.identifiers import NAME_CHARS, header_value, without_controls
from darts_server.serving.lifecycle import Lifecycle

SAFE = ("GET", "HEAD", "DELETE")
"""Methods that start no work."""
HEALTH = ("/health", "/ping")
FORWARDED = (b"forwarded", b"via", b"x-real-ip", b"x-forwarded-")
"""What the names of headers begin with that proxies add to a request."""
REWARDS = "/darts/v1/rewards"
GROUP_ID = "X-Darts-Group-Id"
STATE_KEY = "darts_group_id"
"""Attribute of a request's state that holds the id of its groups, if it was shaped."""

# Compiled as the router does it, so that no spelling of a path matches here and another route there.
_ROUTES = [
    (compile_path(template)[0], frozenset(methods.split()), access, template)
    for access, routes in TABLE.items()
    for template, methods in routes.items()
]


@dataclass(frozen=True, slots=True)
class SecurityMiddleware:
    """ASGI middleware that refuses requests in OpenAI's error form, and names the groups of answers in `GROUP_ID`.

    ``limits``: of request bodies, except for routes with limits of their own. ``on_refusal``: called with the reason of
    each refusal, for metrics. ``lifecycle``: of the server; when it is over, requests for work are refused. ``opened``:
    access of routes that check more themselves, by method and path, in place of the route table's.
    """

    app: ASGIApp
    access: Access
    limits: BodyLimits
    on_refusal: Callable[[str], None]
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    opened: Mapping[tuple[str, str], RouteAccess] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
            # Browsers send OPTIONS before a request with a key, and no route acts on it.
            await self.app(scope, receive, send)
            return
        # Refuse callers without access, and work for a stopping server: what it has can be fetched and rewarded.
        method, path = scope.get("method", "WEBSOCKET"), get_route_path(scope)
        starts_work, lifecycle = method not in SAFE, self.lifecycle
        access, has_own_limits = find_route(method, path)
        try:
            who = self._check_access(scope, method, path, self.opened.get((method, path)) or access)
            if lifecycle.stop_reason is not None and (path in HEALTH or (starts_work and path != REWARDS)):
                raise lifecycle.stop_reason.with_traceback(None)  # or it keeps every request that it refuses
        except DartsError as error:
            await self._refuse(error, scope, receive, send)
            return

        # Limit the body.
        if scope["type"] == "http" and not has_own_limits:
            receive = limited(scope, receive, self.limits, who)

        # Replace a route's error response by ours if its cause is an error of ours. A response that the route has
        # given to an error of ours in a form of its own only gets the error's headers.
        replaced = False

        async def send_replaced(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start":
                status, error = message["status"], None
                if who.refused is not None and status >= HTTPStatus.BAD_REQUEST:
                    error = who.refused
                elif status == HTTPStatus.INTERNAL_SERVER_ERROR:
                    error = lifecycle.stop_reason
                if error is not None:
                    replaced = True
                    await self._refuse(error, scope, receive, send)
                    return
                if group_id := scope.get("state", {}).get(STATE_KEY):
                    MutableHeaders(scope=message)[GROUP_ID] = header_value(group_id)
                if who.answered is not None:
                    MutableHeaders(scope=message).update(headers_of(who.answered))
            if not replaced:
                await send(message)

        token = caller.set(who)
        lifecycle.requests += starts_work
        try:
            await self.app(scope, receive, send_replaced)
        finally:
            lifecycle.requests -= starts_work
            caller.reset(token)
            # Its traceback keeps the request's generators alive, whose tickets are released when they are dropped.
            who.refused = who.answered = None

    def _check_access(self, scope: Scope, method: str, path: str, access: RouteAccess | None) -> Caller:
        headers: dict[bytes, bytes] = {}  # the first of several with the same name
        is_forwarded = False
        for name, value in scope["headers"]:
            headers.setdefault(name, value)
            is_forwarded = is_forwarded or name.startswith(FORWARDED)
        if access is None:  # not in the table: a new route of vLLM's, or no route at all
            is_route = any(route.matches(scope)[0] is Match.FULL for route in scope["app"].routes)
            access = RouteAccess.ADMIN if is_route else RouteAccess.USE
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        key = key.strip() if scheme.lower() == b"bearer" else b""
        # With --forwarded-allow-ips, or FORWARDED_ALLOW_IPS, uvicorn has replaced the client's address by one of
        # X-Forwarded-For. The header remains, so such an address never counts as this machine's.
        sender = Sender(
            scope["client"][0] if scope.get("client") else "",
            headers[b"host"].decode("latin-1") if b"host" in headers else None,
            headers[b"origin"].decode("latin-1") if b"origin" in headers else None,
            is_forwarded,
        )
        who = self.access.check(access, f"{method} {path}", key or None, sender)
        if (request_id := headers.get(b"x-request-id")) is not None:
            who.request_id = without_controls(request_id.decode("latin-1")[:NAME_CHARS])
        return who

    async def _refuse(self, error: DartsError, scope: Scope, receive: Receive, send: Send) -> None:
        self.on_refusal(_reason(error))
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": WS_1008_POLICY_VIOLATION, "reason": str(error)[:100]})
            return
        headers = headers_of(error)
        if isinstance(error, TooLarge | IncompleteBody):
            headers["Connection"] = "close"  # otherwise the server would read and discard the rest of the body
        response = JSONResponse({"error": fields_of(error)}, status_code=status_of(error).value, headers=headers)
        await response(scope, receive, send)


def find_route(method: str, path: str) -> tuple[RouteAccess | None, bool]:
    """Return who may call the route that a request matches, and whether it limits its body itself.

    ``None`` and false if the table has no such route.
    """
    # Not cached by path: callers without a key choose it, at any length.
    method = "GET" if method == "HEAD" else method
    for pattern, methods, access, template in _ROUTES:
        if (method in methods or ANY in methods) and pattern.match(path):
            return access, (method, template) in OWN_LIMITS
    return None, False


def _reason(error: DartsError) -> str:
    """Return the reason of a refusal, as a label in metrics."""
    if isinstance(error, Unauthorized):
        return "key"
    if isinstance(error, Forbidden):
        return "permission"
    if isinstance(error, ServerStopping | EngineDead):
        return "shutdown"
    if isinstance(error, InvalidRequest):
        return "body" if error.field == "body" else "quota"
    return "quota" if isinstance(error, QuotaReached) else "queue"
