"""The webhook of sessions: what is sent, tried again, and dropped."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from darts_server.http import webhook
from darts_server.http.webhook import TRIES, Webhook

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "PAUSE_SECONDS", 0.0)


async def test_events_are_sent_once_and_again_only_after_an_error() -> None:
    answers = [503, 200, 200]
    seen: list[dict[str, Any]] = []
    is_done = asyncio.Event()

    async def receive(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        if len(seen) == 3:
            is_done.set()
        return httpx.Response(answers.pop(0))

    async with Webhook("http://harness/events", httpx.MockTransport(receive)).run_senders() as sent:
        sent.send("g", "s", "stopped", "tail_pruned")
        await asyncio.sleep(0.05)
        sent.send("g", None, "completed", None)
        async with asyncio.timeout(5):
            await is_done.wait()
    stopped = {"group_id": "g", "session": "s", "type": "stopped", "reason": "tail_pruned"}
    assert seen == [stopped, stopped, {"group_id": "g", "session": None, "type": "completed", "reason": None}]
    assert sent.dropped == 0


async def test_a_receiver_that_is_down_loses_its_events_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    async def refuse(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        raise httpx.ConnectError("refused")

    async with Webhook("http://harness/events", httpx.MockTransport(refuse)).run_senders() as sent:
        for _ in range(3):
            sent.send("g", "s", "stopped", None)
        async with asyncio.timeout(5):
            while sent.dropped < 3:
                await asyncio.sleep(0.01)
    assert calls == 3 * TRIES
    assert len(caplog.records) == 1
    assert "http://harness/events" in caplog.text


async def test_each_retry_waits_longer_than_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "PAUSE_SECONDS", 0.05)
    times: list[float] = []

    async def fail(request: httpx.Request) -> httpx.Response:
        times.append(asyncio.get_running_loop().time())
        return httpx.Response(503)

    async with Webhook("http://harness/events", httpx.MockTransport(fail)).run_senders() as sent:
        sent.send("g", "s", "stopped", None)
        async with asyncio.timeout(5):
            while not sent.dropped:
                await asyncio.sleep(0.01)
    assert times[1] - times[0] > 0.04
    assert times[2] - times[1] > 0.08


async def test_a_slow_receiver_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "MAX_WAITING", 2)
    sent = Webhook("http://harness/events")
    for _ in range(5):
        sent.send("g", "s", "stopped", None)
    assert sent.dropped == 3
