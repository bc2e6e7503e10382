"""The ingress as an ASGI app: its parts, and what each request goes through."""

import time
from collections.abc import Awaitable, Callable, Mapping

from starlette._utils import get_route_path
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from darts_server.exceptions import DartsError, GroupAborted, OneServerOnly, TooLarge
from darts_server.http import page
from darts_server.http.body import IncompleteBody
from darts_server.http.errors import body_of, headers_of, status_of
from darts_server.http.requests import while_connected
from darts_server.http.security.access import Sites
from darts_server.ingress.batches.handler import Batches
from darts_server.ingress.call import Call
from darts_server.ingress.everyone.controls import Controls
from darts_server.ingress.everyone.find import Finder
from darts_server.ingress.everyone.health import Health
from darts_server.ingress.everyone.hold import Hold
from darts_server.ingress.everyone.rewards import Rewards
from darts_server.ingress.everyone.weights import Weights
from darts_server.ingress.forwarding.forward import Forwarder
from darts_server.ingress.forwarding.reply import Reply
from darts_server.ingress.guard import Guard
from darts_server.ingress.live.feed import Live
from darts_server.ingress.metrics import IngressMetrics
from darts_server.ingress.replicas.fleet import Fleet
from darts_server.ingress.replicas.member import State
from darts_server.ingress.routes import Handling, handling_of
from darts_server.ingress.routing.router import AnyReplica, RoutedRequest, Router
from darts_server.ingress.routing.terms import read_terms
from darts_server.ingress.settings import IngressSettings
from darts_server.serving.lifecycle import Lifecycle

Handler = Callable[[Call], Awaitable[Response | None]]
"""Returns the response, unless it has passed one on."""
POLICY_VIOLATION = 1008
"""Close code of a websocket."""
UNREAD = {
    Handling.TRAINER_WEIGHTS: "an ingress takes new weights by PUT or POST /darts/v1/weights alone: use these, or "
    "update each server behind it",
    Handling.ONE_SERVER: "this is each server's own, and an ingress has several: send it to each server behind it",
}
"""Requests that are refused before their bodies are read, which may have the size of a model."""


class Ingress:
    """The ASGI app."""

    def __init__(self, fleet: Fleet, settings: IngressSettings, lifecycle: Lifecycle) -> None:
        self._settings = settings
        self._guard = Guard(fleet, Sites(settings.allowed_hosts, settings.allowed_origins), settings.max_body_bytes)
        metrics = IngressMetrics(lambda: {m.name: m.state for m in fleet.members}, [state.value for state in State])
        fleet.sharing.report = metrics.observations_sent
        self._forwarder = Forwarder(fleet, metrics)
        self._router, self._hold = Router(fleet), Hold()
        self._weights = Weights(fleet, self._hold)
        self._batches = Batches(fleet, self._router, self._forwarder, self._hold)
        health, finder, rewards = Health(fleet, metrics, lifecycle), Finder(fleet), Rewards(fleet)
        self._handlers: Mapping[Handling, Handler] = {
            Handling.GENERATE: self._generate,
            Handling.ANY: self._forward,
            Handling.BATCH: self._batch,
            Handling.WEIGHTS: self._load,
            Handling.FIND: finder.find,
            Handling.GROUPS: finder.find_groups,
            Handling.PROMPT: finder.find_prompt,
            Handling.ALL: Controls(fleet).send_to_all,
            Handling.REWARDS: rewards.report,
            Handling.LIVE: Live(fleet, lifecycle).live,
            Handling.PAGE: _page,
            Handling.HEALTH: health.health,
            Handling.METRICS: health.metrics,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": UNREAD[Handling.ONE_SERVER]})
            return
        assert scope["type"] == "http", "the server is run without lifespan events"
        request, path = Request(scope, receive), get_route_path(scope)
        reply = Reply(path, send)
        try:
            response = await self._respond(request, path, reply)
        except GroupAborted:  # the caller disconnected
            return
        except DartsError as error:
            if reply.begun:
                raise  # the server closes the connection
            response = _refusal(error)
        if response is not None:
            await response(scope, receive, send)

    async def _respond(self, request: Request, path: str, reply: Reply) -> Response | None:
        self._guard.check(request, path)
        handling = handling_of(request.method, path)
        if handling in UNREAD:
            raise OneServerOnly(f"{request.method} {path}: {UNREAD[handling]}")
        if handling is Handling.WEIGHTS and request.method == "PUT":
            return await self._weights.push(request, self._guard.head(request))
        outgoing = await self._guard.read(request)
        call = Call(request, path, outgoing, reply, time.perf_counter())
        return await while_connected(request, self._handle(handling, call))

    async def _handle(self, handling: Handling, call: Call) -> Response | None:
        return await self._handlers[handling](call)

    async def _load(self, call: Call) -> Response:
        return await self._weights.load(call.outgoing)

    async def _batch(self, call: Call) -> Response | None:
        await self._hold.wait()  # one that is not divided does not wait later
        return await self._batches.run(call)

    async def _generate(self, call: Call) -> None:
        terms = await read_terms(call.headers, call.body, self._settings.group_pattern)
        placement = RoutedRequest(self._router, terms)
        if not placement.may_complete_a_group:  # one that runs, for which the update waits
            await self._hold.wait()
        await self._forwarder.forward(call.outgoing, placement, call.reply, call.received_at)

    async def _forward(self, call: Call) -> None:
        await self._forwarder.forward(call.outgoing, AnyReplica(self._router), call.reply, call.received_at)


async def _page(call: Call) -> Response:
    return page.response() if call.path.endswith("/") else page.redirect()


def _refusal(error: DartsError) -> Response:
    headers = headers_of(error)
    if isinstance(error, TooLarge | IncompleteBody | OneServerOnly):
        headers["Connection"] = "close"  # otherwise the server would read and discard the rest of the body
    return JSONResponse(body_of(error), status_code=status_of(error).value, headers=headers)
