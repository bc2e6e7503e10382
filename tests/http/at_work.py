"""A server at work for a browser: our routes and the page, over groups on the scripted engine, by real time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from unittest.mock import Mock
from uuid import uuid4

import httpx
from fastapi import Response

from darts_server.engine.scripted import Script
from darts_server.http import page
from darts_server.http.body import BodyLimits
from darts_server.http.security.access import Access, Keys
from darts_server.http.security.middleware import SecurityMiddleware
from tests.clients.servers import application, listening

STEP_SECONDS = 0.02


def heavy_tail(request: str, index: int) -> Script:
    """Lengths of 3 seconds and more: most are short, some much longer."""
    rng = Random(f"{request}/{index}")
    return Script(min(400, round(20 * rng.lognormvariate(0.4, 0.8)) + 150))


@contextmanager
def at_work(*keys: str) -> Iterator[tuple[str, Callable[..., None]]]:
    """The address of the page, and a function that begins a group of 8 for each of these prompts."""
    with application(heavy_tail, STEP_SECONDS, bool(keys)) as (app, _):
        access = Access(Keys(keys))
        app.add_middleware(SecurityMiddleware, access=access, limits=BodyLimits(2**20), on_refusal=Mock())
        app.include_router(page.routes())
        app.add_route("/health", lambda _: Response())
        with listening(app) as listener:

            def ask(*names: str) -> None:
                prompts = [{"text": str(number), "key": name} for number, name in enumerate(names)]
                body = {"prompts": prompts, "group_size": 8, "stream": "groups"}
                headers = {"Idempotency-Key": uuid4().hex}  # it goes on when nobody reads
                with httpx.stream("POST", f"{listener.url}/darts/v1/rollouts", json=body, headers=headers) as answer:
                    next(answer.iter_lines())

            yield f"{listener.url}/darts/", ask
