import threading
import time
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import anyio
import httpx
import pytest
from fastapi import FastAPI

from darts_server.http import errors
from darts_server.http.resources.state import add_routes
from tests.http.serving import client

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx`")
URL = "/darts/v1/state"


class Slow:
    """A store that records the threads of its callers, and how many call at once."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.inside = self.most = 0
        self.lock = threading.Lock()

    def _work(self) -> None:
        self.threads.add(threading.get_ident())
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(0.02)
        with self.lock:
            self.inside -= 1

    def export(self) -> bytes:
        self._work()
        return b""

    def restore(self, data: bytes) -> None:
        self._work()

    def count(self, kind: str) -> int:
        return 7


def test_an_invalid_file_is_a_400_and_changes_nothing() -> None:
    with client() as caller:
        saved = caller.get(URL).content
        for bad in (saved[:-1], saved.replace(b"darts-state 1", b"darts-state 2", 1)):
            answer = caller.put(URL, content=bad)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body")
            assert "nothing was changed" in answer.json()["error"]["message"]
            assert caller.get(URL).content == saved
        assert caller.put(URL, content=saved).json() == {"prompts": 2}


async def _chunks(taken: list[int]) -> AsyncIterator[bytes]:
    for number in range(100):
        taken.append(number)
        yield b"x" * 1000


@pytest.mark.anyio
async def test_a_file_above_the_limit_is_refused_before_it_is_complete() -> None:
    slow: Any = Slow()
    taken = list[int]()
    app = FastAPI()
    errors.install_handlers(app)
    add_routes(app.router, slow, Mock(), max_bytes=5000)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as caller:
        answer = await caller.put("/state", content=_chunks(taken))
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "RequestTooLargeError")
        assert len(taken) < 10
        assert (await caller.put("/state", content=b"x" * 5001)).status_code == 413
        assert not slow.threads
        assert (await caller.put("/state", content=b"x" * 5000)).json() == {"prompts": 7}


@pytest.mark.anyio
async def test_one_restore_runs_at_a_time_and_never_in_the_loop() -> None:
    slow: Any = Slow()
    app = FastAPI()
    add_routes(app.router, slow, Mock())
    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as caller,
        anyio.create_task_group() as group,
    ):
        for _ in range(4):
            group.start_soon(lambda: caller.put("/state", content=b""))
    assert slow.most == 1
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as caller:
        assert (await caller.get("/state")).status_code == 200
    assert threading.get_ident() not in slow.threads
