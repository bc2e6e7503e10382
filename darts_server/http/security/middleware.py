"""The guard before the whole app, vLLM's routes and ours: keys, sizes of bodies, and what refusals look like."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from http import HTTPStatus

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
from darts_server.http.body import STALL_SECONDS
from darts_server.http.errors import body_of, headers_of, status_of
from darts_server.http.security.access import Access, Kind
from darts_server.http.security.route_table import has_own_limits, kind_of
from darts_server.serving.admission import Caller, caller
from darts_server.serving.lifecycle import Life

REFUSED_BELOW = 400
"""Answers with such a status and above are replaced where the guard knows the cause."""
SAFE = ("GET", "HEAD", "DELETE")
"""Methods that ask for no work."""
REQUEST_ID, LONGEST_REQUEST_ID = b"x-request-id", 200
TRACE = (b"traceparent", b"tracestate")
HEALTH = ("/health", "/ping")
REWARDS = "/darts/v1/rewards"
CLOSED = 1008
"""A websocket's code for a violated policy."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """``most``: bytes. ``stall``: seconds without a byte after which a sender is taken for gone."""

    most: int
    stall: float = STALL_SECONDS


class Guard:
    """ASGI middleware.

    Args:
        limits: of bodies, but for routes that have their own.
        life: of the server; at its end it takes no work.
        told: hears of every refusal, by its reason.
    """

    def __init__(
        self, app: ASGIApp, access: Access, limits: BodyLimits, told: Callable[[str], None], life: Life | None = None
    ) -> None:
        self._app = app
        self._life = life or Life()
        self._access = access
        self._limits = limits
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
            # No route acts on OPTIONS; browsers ask so before they send a key.
            await self._app(scope, receive, send)
            return
        try:
            name = self._let_through(scope)
            if self._life.over is not None and _needs_life(scope):
                raise self._life.over
        except DartsError as error:
            await self._refuse(error, scope, receive, send)
            return
        who = Caller(name, request_id=_request_id(scope), trace=_trace(scope))
        token = caller.set(who)
        try:
            with self._life.inside() if scope.get("method") not in SAFE else nullcontext():
                await self._app(scope, self._limited(scope, receive, who), self._telling(scope, receive, send, who))
        finally:
            caller.reset(token)

    def _let_through(self, scope: Scope) -> str | None:
        headers = dict(reversed(scope["headers"]))  # of several with one name, the first
        method, path = scope.get("method", "WEBSOCKET"), _path(scope)
        kind = kind_of(method, path) or (Kind.ADMIN if _is_route(scope) else Kind.USE)
        origin = headers.get(b"origin")
        return self._access.check(
            kind,
            f"{method} {path}",
            _key(headers.get(b"authorization", b"")),
            scope["client"][0] if scope.get("client") else "",
            None if origin is None else origin.decode("latin-1"),
        )

    def _limited(self, scope: Scope, receive: Receive, who: Caller) -> Receive:
        if scope["type"] != "http" or has_own_limits(scope["method"], _path(scope)):
            return receive
        return _Body(receive, scope, self._limits, who).receive

    def _telling(self, scope: Scope, receive: Receive, send: Send, who: Caller) -> Send:
        """Has a refusal answered in our words, whatever a route made of it."""
        replaced = False

        async def sending(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start" and (error := self._cause(message["status"], who)) is not None:
                replaced = True
                await self._refuse(error, scope, receive, send)
            elif not replaced:
                await send(message)

        return sending

    def _cause(self, status: int, who: Caller) -> DartsError | None:
        """Of an answer with that status, if it is known here."""
        if who.refused is not None and status >= REFUSED_BELOW:
            return who.refused
        return self._life.over if status == HTTPStatus.INTERNAL_SERVER_ERROR else None

    async def _refuse(self, error: DartsError, scope: Scope, receive: Receive, send: Send) -> None:
        self._told(_reason(error))
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": CLOSED, "reason": str(error)[:100]})
            return
        headers = headers_of(error)
        if isinstance(error, TooLarge | _Stalled):
            headers["Connection"] = "close"  # or the rest of the body would be read, and thrown away
        answer = JSONResponse(body_of(error), status_code=status_of(error).value, headers=headers)
        await answer(scope, receive, send)


class _Stalled(InvalidRequest):
    """The sender of a body seems to have gone."""


class _Body:
    """A request's body, as far as it may come."""

    def __init__(self, receive: Receive, scope: Scope, limits: BodyLimits, who: Caller) -> None:
        self._receive = receive
        self._limits = limits
        self._who = who
        self._size = 0
        self._whole = False
        self._announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"")

    async def receive(self) -> Message:
        """
        Raises:
            TooLarge: more has come, or is announced, than may.
            InvalidRequest: nothing has come for too long.
        """
        if self._whole:
            return await self._receive()
        if self._announced.isdigit() and int(self._announced) > self._limits.most:
            raise self._refused(TooLarge("body", self._too_large()))
        try:
            async with asyncio.timeout(self._limits.stall):
                message = await self._receive()
        except TimeoutError:
            raise self._refused(_Stalled("body", "did not come to its end; send it again")) from None
        self._size += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._size > self._limits.most:
            raise self._refused(TooLarge("body", self._too_large()))
        return message

    def _refused(self, error: InvalidRequest) -> InvalidRequest:
        self._who.refused = error
        return error

    def _too_large(self) -> str:
        return f"at most {self._limits.most} bytes are taken (--max-body-bytes); send less at a time"


def _path(scope: Scope) -> str:
    """As Starlette's router sees it."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    below = path.removeprefix(root)
    return below if root and path.startswith(root) and below.startswith("/") else path


def _request_id(scope: Scope) -> str | None:
    given: bytes | None = next((value for name, value in scope["headers"] if name == REQUEST_ID), None)
    return None if given is None else given.decode("latin-1")[:LONGEST_REQUEST_ID]


def _trace(scope: Scope) -> dict[str, str]:
    return {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in TRACE}


def _needs_life(scope: Scope) -> bool:
    """Whether a server that takes no work refuses it. What has been done can still be asked for, and rewarded."""
    path = _path(scope)
    return path in HEALTH or (scope.get("method") not in SAFE and path != REWARDS)


def _is_route(scope: Scope) -> bool:
    """Whether the app would do something with the request, other than to say that there is no such route."""
    return any(route.matches(scope)[0] is Match.FULL for route in scope["app"].routes)


def _key(authorization: bytes) -> bytes | None:
    scheme, _, key = authorization.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" and key.strip() else None


def _reason(error: DartsError) -> str:
    """For metrics."""
    if isinstance(error, Unauthorized):
        return "key"
    if isinstance(error, Forbidden):
        return "permission"
    if isinstance(error, ServerStopping | EngineDead):
        return "shutdown"
    if isinstance(error, InvalidRequest):
        return "body" if error.field == "body" else "quota"
    return "quota" if isinstance(error, QuotaReached) else "queue"
