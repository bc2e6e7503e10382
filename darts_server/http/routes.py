"""Add the routes of our API under ``/darts/v1``, and make vLLM's public routes cheap."""

import asyncio
import copy
import time
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from darts_server.exceptions import RETRY_SECONDS, Overloaded
from darts_server.http.openapi import BEARER, FAILURES
from darts_server.http.resources import groups, monitor, policy, rewards, rollouts, sessions, state, vote, weights
from darts_server.rollout.batches.registry import BatchRegistry
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.observers.provenance import Provenance
from darts_server.rollout.observers.reward_matching import RewardMatcher
from darts_server.rollout.sessions.registry import SessionRegistry
from darts_server.rollout.voting import VoteRunner
from darts_server.store import Store
from darts_server.weights.updates import Updates

METRICS = "/metrics"
MAX_PENDING = 8
"""Callers choose the query and the headers that make answers differ."""
PAUSE_FACTOR = 4.0
"""Pause after an answer, as a multiple of its seconds: answers take at most a fifth of the event loop's time."""


def create_router(
    provenance: Provenance,
    statistics: Statistics,
    store: Store,
    control: policy.PolicyControl,
    batches: BatchRegistry[Any, Any],
    votes: VoteRunner[Any, Any],
    session_registry: SessionRegistry,
    reward_matcher: RewardMatcher,
    updates: Updates,
    monitor_sources: monitor.MonitorSources,
    needs_key: bool,
) -> APIRouter:
    """Create the routes. ``needs_key``: whether OpenAPI describes a key, which `SecurityMiddleware` checks."""
    dependencies = [Depends(BEARER)] if needs_key else []
    api = APIRouter(
        prefix="/darts/v1",
        tags=["darts"],
        dependencies=dependencies,
        responses=FAILURES,
    )

    groups.add_routes(api, provenance, statistics, reward_matcher)
    rollouts.add_routes(api, batches)
    vote.add_routes(api, votes)
    sessions.add_routes(api, session_registry)
    rewards.add_routes(api, reward_matcher)
    state.add_routes(api, store, statistics)
    policy.add_routes(api, control)
    weights.add_routes(api, updates)
    monitor.add_routes(api, monitor_sources)
    return api


class SharedAnswers:
    """ASGI app that makes one answer for all requests that wait for the same answer.

    An answer is made after its requests have arrived, so it is never older than a request.

    Args:
        varies: whether the answer depends on the path, the query and the header ``Accept``, and not on gzip alone.
    """

    def __init__(self, app: ASGIApp, *, varies: bool) -> None:
        self._app = app
        self._varies = varies
        self._pending: dict[object, asyncio.Task[list[Message]]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._not_before = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        key: tuple[object, ...] = (scope["method"], "gzip" in headers.get("accept-encoding", ""))
        if self._varies:
            key += (scope["path"], scope["query_string"], *headers.getlist("accept"))

        pending = self._pending.get(key)
        if pending is None:
            if len(self._pending) >= MAX_PENDING:
                raise Overloaded(f"{MAX_PENDING} other requests wait for answers of this page; retry", RETRY_SECONDS)
            pending = asyncio.create_task(self._make_answer(key, scope))
            self._pending[key] = pending

        # If this client disconnects, others may still wait for the answer.
        for message in await asyncio.shield(pending):
            # A copy, because middleware adds headers to the message.
            await send(copy.deepcopy(message))

    async def _make_answer(self, key: object, scope: Scope) -> list[Message]:
        messages: list[Message] = []

        async def receive_empty_body() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def collect_message(message: Message) -> None:
            messages.append(message)

        async with self._one_at_a_time:
            await asyncio.sleep(self._not_before - time.monotonic())
            # Later requests must not get this answer, which would be older than they are.
            del self._pending[key]
            begin = time.monotonic()
            try:
                await self._app(scope, receive_empty_body, collect_message)
            finally:
                end = time.monotonic()
                self._not_before = end + PAUSE_FACTOR * (end - begin)
        return messages


def share_answers(application: FastAPI) -> None:
    """Share the answers of vLLM's public routes, because each answer takes milliseconds to make."""
    for route in list(application.routes):
        # Our route at position 0 is matched before vLLM's route.
        if isinstance(route, APIRoute) and route.path == METRICS:
            application.routes.insert(0, _create_metrics_route(route))
        elif isinstance(route, Mount) and route.path == METRICS:
            # The mount gets all other paths that begin with /metrics.
            route.app = SharedAnswers(route.app, varies=True)
        elif isinstance(route, Route) and route.path == application.openapi_url:
            application.routes.insert(0, _create_description_route(application, route))


def _create_metrics_route(route: APIRoute) -> Route:
    # vLLM's own route runs in a thread, but our gauges read values that the event loop changes.
    async def metrics(scope: Scope, receive: Receive, send: Send) -> None:
        answer: Response = route.endpoint(Request(scope))
        await answer(scope, receive, send)

    return Route(
        METRICS,
        SharedAnswers(metrics, varies=False),
        methods=["GET"],
        include_in_schema=False,
    )


def _create_description_route(application: FastAPI, route: Route) -> Route:
    # Making the description takes a second.
    made: bytes | None = None
    one_at_a_time = asyncio.Lock()

    async def description(request: Request) -> Response:
        nonlocal made
        async with one_at_a_time:
            if made is None:
                # The app caches the result of this call, and the route's endpoint returns it.
                await anyio.to_thread.run_sync(application.openapi)
                answer = await route.endpoint(request)
                made = bytes(answer.body)
        return Response(made, media_type="application/json")

    return Route(route.path, description, include_in_schema=False)
