"""Our routes on an app of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import Mock

from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from darts_server.control import Control
from darts_server.http import errors
from darts_server.http.group_id import STATE_KEY, GroupIdHeader
from darts_server.http.routes import router
from darts_server.http.state import State
from darts_server.rollout.prompts import Prompts
from darts_server.rollout.provenance import Provenance
from darts_server.settings import load
from darts_server.store import Store
from tests.rollout.test_prompts import FINISHED, record

HERE = "127.0.0.1"


@contextmanager
def client(*keys: str, host: str | None = HERE, state: State | None = None) -> Iterator[TestClient]:
    """A caller at the address ``host``. The prompts ``p`` and ``gsm8k/7`` are known, and the groups ``cmpl-a-…``.

    ``state``: stands in for the store in its own route.
    """
    with Store() as store:
        prompts, provenance = Prompts(store), Provenance()
        for observe in (prompts.learn, provenance.group_ended):
            observe(replace(record(*FINISHED), group_id="cmpl-a-0"))
            observe(replace(record(*FINISHED), group_id="cmpl-a-1"))
        prompts.learn(replace(record(*FINISHED), prompt_key="gsm8k/7"))
        app = FastAPI()
        errors.install(app)
        app.add_middleware(GroupIdHeader)
        app.include_router(router(provenance, prompts, state or store, Control(load({}, None)), Mock(), keys))

        @app.get("/shaped")
        async def shaped(request: Request) -> None:
            setattr(request.state, STATE_KEY, "cmpl-a")

        @app.get("/unshaped")
        async def unshaped() -> None:
            pass

        yield TestClient(app, client=None if host is None else (host, 1))  # type: ignore[arg-type]
