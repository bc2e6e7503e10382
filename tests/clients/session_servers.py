"""A server with groups of sessions, whose turns are scripted: each generates the tokens that its request names."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from darts_server.engine.scripted import Script
from darts_server.http.body import BodyLimits
from darts_server.http.security.access import Access
from darts_server.http.security.middleware import SecurityMiddleware
from darts_server.http.security.session_paths import SessionPaths
from darts_server.rollout.sessions.registry import SessionRegistry
from darts_server.rollout.sessions.session_group import SessionGroup

from .servers import STEP_SECONDS, Listener, application, listening

TURNS = "/completions"
EVENTS = "/events"


class SessionServer:
    """The server's routes on a port, and the groups behind them."""

    def __init__(self, listener: Listener, registry: SessionRegistry) -> None:
        self.url = listener.url
        self.drop_connections = listener.drop_connections
        self.registry = registry
        self.requests: Counter[str] = Counter()
        """Number of requests by method and path."""

    def count(self, ending: str, session_id: str = "") -> int:
        """Return the number of requests whose path has the ending and the id of the session."""
        return sum(n for path, n in self.requests.items() if path.endswith(ending) and session_id in path)

    def group(self, group_id: str) -> SessionGroup:
        return self.registry.find_group(group_id)


class _CountRequests:
    def __init__(self, app: ASGIApp, counts: Counter[str]) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._counts[f"{scope['method']} {scope['path']}"] += 1
        await self._app(scope, receive, send)


@contextmanager
def serving_sessions() -> Iterator[SessionServer]:
    """Serve our routes and `v1/completions`, which generates `max_tokens` tokens, one every 2 ms."""
    with application(lambda prompt, index: Script(1)) as (app, _):
        registry = app.state.sessions
        _add_turns(app, registry)
        counts: Counter[str] = Counter()
        app.add_middleware(
            SecurityMiddleware,
            access=Access(),
            limits=BodyLimits(2**20),
            on_refusal=lambda _: None,
            find_session_of_key=registry.owner_of_key,
        )
        app.add_middleware(SessionPaths)
        app.add_middleware(_CountRequests, counts=counts)
        with listening(app) as listener:
            server = SessionServer(listener, registry)
            server.requests = counts
            yield server


def _add_turns(app: FastAPI, registry: SessionRegistry) -> None:
    @app.post("/v1/completions")
    async def complete(request: Request) -> dict[str, Any]:
        body = await request.json()
        session = registry.find_named(None)
        assert session is not None
        tokens: list[int] = []
        stopped = asyncio.Event()
        turn = session.group.begin_turn(session, lambda: len(tokens), stopped.set)
        try:
            while len(tokens) < body["max_tokens"] and not stopped.is_set():
                await asyncio.sleep(STEP_SECONDS)
                tokens.append(len(tokens))
            turn.finish(body["prompt"], tokens, [-0.5] * len(tokens))
        finally:
            turn.leave(len(tokens))
        state = "over" if session.state.is_over else "open"
        request.state.darts_session_state = f"id={session.session_id}; state={state}"
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": "abort" if stopped.is_set() else "stop",
            "logprobs": None,
            "token_ids": tokens,
        }
        return {"id": "cmpl", "object": "text_completion", "created": 0, "model": "tiny", "choices": [choice]}
