"""Check every request, on vLLM's routes and ours: API keys, body limits, shutdown, and the form of errors."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from http import HTTPStatus
from types import MappingProxyType

from starlette._utils import get_route_path
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
from darts_server.http.body import BodyLimits, IncompleteBody, LimitedBody
from darts_server.http.errors import body_of, headers_of, status_of
from darts_server.http.security.access import Access, RouteAccess, Sender
from darts_server.http.security.route_table import access_of, has_own_limits
from darts_server.identifiers import NAME_CHARS, without_controls
from darts_server.serving.admission import Caller, caller
from darts_server.serving.lifecycle import Lifecycle

MIN_ERROR_STATUS = 400
SAFE = ("GET", "HEAD", "DELETE")
"""Methods that start no work."""
REQUEST_ID = b"x-request-id"
TRACE = (b"traceparent", b"tracestate")
HEALTH = ("/health", "/ping")
FORWARDED = (b"forwarded", b"via", b"x-real-ip", b"x-forwarded-")
"""What the names of headers begin with that proxies add to a request."""
REWARDS = "/darts/v1/rewards"
POLICY_VIOLATION = 1008
"""Close code of a websocket."""


class SecurityMiddleware:
    """ASGI middleware that refuses requests in OpenAI's error form.

    Args:
        limits: of request bodies, except for routes with limits of their own.
        lifecycle: of the server; when it is over, requests for work are refused.
        on_refusal: called with the reason of each refusal, for metrics.
        opened: access of routes that check more themselves, by method and path, in place of the route table's.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        limits: BodyLimits,
        on_refusal: Callable[[str], None],
        lifecycle: Lifecycle | None = None,
        opened: Mapping[tuple[str, str], RouteAccess] = MappingProxyType({}),
    ) -> None:
        self._app = app
        self._opened = opened
        self._lifecycle = lifecycle or Lifecycle()
        self._access = access
        self._limits = limits
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
            # Browsers send OPTIONS before a request with a key, and no route acts on it.
            await self._app(scope, receive, send)
            return
        try:
            who = self._check_access(scope)
            if self._lifecycle.stop_reason is not None and _is_refused_at_shutdown(scope):
                raise self._lifecycle.stop_reason.with_traceback(None)  # or it keeps every request that it refuses
        except DartsError as error:
            await self._refuse(error, scope, receive, send)
            return
        who.request_id, who.trace = _request_id(scope), _trace(scope)
        token = caller.set(who)
        try:
            with self._lifecycle.track_request() if scope.get("method") not in SAFE else nullcontext():
                await self._app(
                    scope, self._limit_body(scope, receive, who), self._replace_errors(scope, receive, send, who)
                )
        finally:
            caller.reset(token)
            # Its traceback keeps the request's generators alive, whose tickets are released when they are dropped.
            who.refused = who.answered = None

    def _check_access(self, scope: Scope) -> Caller:
        headers = dict(reversed(scope["headers"]))  # the first of several with the same name
        method, path = scope.get("method", "WEBSOCKET"), get_route_path(scope)
        route_access = (
            self._opened.get((method, path))
            or access_of(method, path)
            or (RouteAccess.ADMIN if _is_route(scope) else RouteAccess.USE)
        )
        return self._access.check(
            route_access, f"{method} {path}", _key(headers.get(b"authorization", b"")), _sender(scope, headers)
        )

    def _limit_body(self, scope: Scope, receive: Receive, who: Caller) -> Receive:
        if scope["type"] != "http" or has_own_limits(scope["method"], get_route_path(scope)):
            return receive
        body = LimitedBody(scope, receive, self._limits)

        async def receive_limited() -> Message:
            try:
                return await body.receive()
            except InvalidRequest as error:
                who.refused = error
                raise

        return receive_limited

    def _replace_errors(self, scope: Scope, receive: Receive, send: Send, who: Caller) -> Send:
        """Replace a route's error response by our own, if its cause is an error of ours.

        One that the route has answered in a form of its own only gets the error's headers.
        """
        replaced = False

        async def send_replaced(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start" and (error := self._cause(message["status"], who)) is not None:
                replaced = True
                await self._refuse(error, scope, receive, send)
            elif not replaced:
                if message["type"] == "http.response.start" and who.answered is not None:
                    MutableHeaders(scope=message).update(headers_of(who.answered))
                await send(message)

        return send_replaced

    def _cause(self, status: int, who: Caller) -> DartsError | None:
        """Return the error of ours that caused a response with this status, if there is one."""
        if who.refused is not None and status >= MIN_ERROR_STATUS:
            return who.refused
        return self._lifecycle.stop_reason if status == HTTPStatus.INTERNAL_SERVER_ERROR else None

    async def _refuse(self, error: DartsError, scope: Scope, receive: Receive, send: Send) -> None:
        self._on_refusal(_reason(error))
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": str(error)[:100]})
            return
        headers = headers_of(error)
        if isinstance(error, TooLarge | IncompleteBody):
            headers["Connection"] = "close"  # otherwise the server would read and discard the rest of the body
        response = JSONResponse(body_of(error), status_code=status_of(error).value, headers=headers)
        await response(scope, receive, send)


def _request_id(scope: Scope) -> str | None:
    value: bytes | None = next((each for name, each in scope["headers"] if name == REQUEST_ID), None)
    return None if value is None else without_controls(value.decode("latin-1")[:NAME_CHARS])


def _trace(scope: Scope) -> dict[str, str]:
    return {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in TRACE}


def _is_refused_at_shutdown(scope: Scope) -> bool:
    """Return whether a stopping server refuses the request. What it has can be fetched and rewarded."""
    path = get_route_path(scope)
    return path in HEALTH or (scope.get("method") not in SAFE and path != REWARDS)


def _is_route(scope: Scope) -> bool:
    """Return whether any route of the app matches the request."""
    return any(route.matches(scope)[0] is Match.FULL for route in scope["app"].routes)


def _sender(scope: Scope, headers: Mapping[bytes, bytes]) -> Sender:
    """Return where a request comes from."""
    # With --forwarded-allow-ips, or FORWARDED_ALLOW_IPS, uvicorn has replaced the client's address by one of
    # X-Forwarded-For. The header remains, so such an address never counts as this machine's.
    return Sender(
        scope["client"][0] if scope.get("client") else "",
        headers[b"host"].decode("latin-1") if b"host" in headers else None,
        headers[b"origin"].decode("latin-1") if b"origin" in headers else None,
        any(name.startswith(FORWARDED) for name in headers),
    )


def _key(authorization: bytes) -> bytes | None:
    scheme, _, key = authorization.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" and key.strip() else None


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
