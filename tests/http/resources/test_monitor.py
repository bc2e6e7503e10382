"""The monitor's events as they are sent, on the scripted engine."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import anyio
import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient
from starlette.types import Message

from darts_server.engine.scripted import settle
from darts_server.http import errors
from darts_server.http.resources.monitor import (
    KEPT_UPDATES,
    MAX_VIEWERS,
    QUIET_SECONDS,
    Feed,
    MonitorAnswer,
    MonitorSources,
    routes,
)
from darts_server.http.sse import MEDIA_TYPE
from darts_server.policy.reward_stats import RewardStats, single_length
from darts_server.records import UpdateRecord
from darts_server.rollout.learned.statistics import Rewards
from darts_server.serving.admission import Caller, caller
from darts_server.types import UpdateOutcome
from darts_server.weights.coordinator import State
from darts_server.weights.updates import Updates
from tests.rollout.helpers import Documents, Harness, lengths
from tests.rollout.observers.test_monitor import EVERYTHING, new_monitor

pytestmark = pytest.mark.anyio


class Server:
    """Sources of the monitor, set by the test."""

    def __init__(self, harness: Harness, **most: int) -> None:
        self.live = new_monitor(harness, **most)
        self.rewards = Rewards(Documents())
        self.updates = Mock(spec=Updates, version=3, state=State.SERVING, last=None)
        self.fault: str | None = None
        self.stopping = False
        self.sources = MonitorSources(self.live, self.rewards, self.updates, lambda: self.fault, lambda: self.stopping)

    def events(self, quiet: float = 60.0) -> AsyncGenerator[bytes, None]:
        return self.feed(quiet).events()

    def feed(self, quiet: float = 60.0) -> Feed:
        return Feed(self.sources, EVERYTHING, interval=0, quiet=quiet)


def read(chunk: bytes) -> tuple[str, dict[str, Any]]:
    """The name of an event, and its data in its documented form."""
    name, data = chunk.decode().removesuffix("\n\n").split("\n")
    answer = json.loads(data.removeprefix("data: "))
    MonitorAnswer.model_validate(answer)
    return name.removeprefix("event: "), answer


async def test_the_first_event_has_everything_and_later_ones_the_changes() -> None:
    harness = Harness(lengths(3, 5, 9))
    server = Server(harness)
    harness.run(2, group_id="g")
    await settle()
    async with aclosing(server.events()) as stream:
        name, answer = read(await anext(stream))
        assert (name, answer["running"], answer["candidates"]) == ("snapshot", 1, 3)
        assert [c["state"] for c in answer["groups"][0]["candidates"]] == ["running"] * 3
        await harness.engine.step()
        name, answer = read(await anext(stream))
        assert (name, answer["now"]) == ("update", 1)
        assert answer["groups"] == [{"group_id": "g", "candidates": [{"index": i, "tokens": 1} for i in range(3)]}]


async def test_events_are_sent_for_changes_and_after_a_quiet_interval() -> None:
    harness = Harness(lengths(3))
    server = Server(harness)
    async with aclosing(server.events()) as stream:
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await settle()
        assert not waiting.done()
        server.fault = "the disk is full"
        assert read(await waiting)[1]["health"]["store_fault"] == "the disk is full"
    async with aclosing(server.events(quiet=0.01)) as stream:
        assert [read(await anext(stream))[0] for _ in range(3)] == ["snapshot", "update", "update"]


async def test_health_has_weights_and_rewards() -> None:
    server = Server(Harness(lengths(1)))
    server.updates.last = UpdateRecord(3, UpdateOutcome.FAILED, "push", "keep", False, {"load": 2.0}, "too large")
    health = server.sources.health()
    assert health["weights"]["last"]["error"] == "too large"
    assert health["rewards"] is None
    server.rewards.learn({None: RewardStats(right=single_length(5), wrong=single_length(9), groups=4, zero_variance=1)})
    rewards = {"rewarded": 2, "pass_rate": 0.5, "rewarded_groups": 4, "zero_variance_groups": 1}
    assert server.sources.health()["rewards"] == rewards


async def test_a_slow_reader_gets_one_event_for_all_changes_and_no_queue() -> None:
    harness = Harness(lengths(4))
    server = Server(harness, max_groups=10)
    feed = server.feed()
    async with aclosing(feed.events()) as stream:
        await anext(stream)
        for number in range(60):
            harness.run(8, group_id=f"g{number}")
            await settle()
            await harness.engine.run()
        assert feed._viewer._running == {}
        _, answer = read(await anext(stream))
        assert [group["group_id"] for group in answer["groups"]] == [f"g{number}" for number in range(50, 60)]
        waiting = asyncio.ensure_future(anext(stream))
        await settle()
        assert not waiting.done()  # that was all
        waiting.cancel()
        await settle()


async def test_a_viewer_that_accepts_nothing_is_dropped() -> None:
    server = Server(Harness(lengths(1)))
    feed = server.feed()
    answer = feed.stream(send_timeout=0.01)

    async def receive() -> Message:
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await anyio.sleep_forever()

    with anyio.fail_after(10):
        await answer({"type": "http", "method": "GET", "asgi": {"spec_version": "2.4"}}, receive, send)
    assert feed.viewers == 0


async def test_an_event_is_made_once_for_all_viewers_of_a_caller() -> None:
    harness = Harness(lengths(9))
    server = Server(harness)
    made: list[None] = []
    sources = replace(server.sources, fault=lambda: made.append(None))
    harness.run(2, group_id="g")
    await settle()
    feed = Feed(sources, EVERYTHING, interval=60, quiet=0.01)
    viewers = [feed.events() for _ in range(20)]
    assert [read(await anext(viewer))[0] for viewer in viewers[1:]] == ["snapshot"] * 19
    harness.engine.now += 5
    assert read(await anext(viewers[0]))[1]["now"] == 5
    assert len(made) == 1
    await harness.engine.step()
    feed._due = 0.0
    updates = [await anext(viewer) for viewer in viewers]
    assert (len(made), set(map(len, updates)), read(updates[0])[0]) == (2, {len(updates[0])}, "update")
    for viewer in viewers:
        await viewer.aclose()


async def test_a_viewer_gets_the_updates_that_it_missed_or_everything() -> None:
    harness = Harness(lengths(50))
    feed = Server(harness).feed(quiet=0.01)
    harness.run(2, group_id="g")
    await settle()
    slow = feed.events()
    assert read(await anext(slow))[0] == "snapshot"
    for missed in (KEPT_UPDATES, KEPT_UPDATES + 1):
        for _ in range(missed):
            await harness.engine.step()
            feed._advance()
        feed._due = time.monotonic() + 60
        chunks = (await anext(slow)).split(b"\n\n")[:-1]
        assert [read(chunk + b"\n\n")[0] for chunk in chunks] == (
            ["update"] * missed if missed == KEPT_UPDATES else ["snapshot"]
        )
        [group] = read(chunks[-1] + b"\n\n")[1]["groups"]
        assert group["candidates"][0]["tokens"] == harness.engine.now
    await slow.aclose()


def test_events_become_as_rare_as_the_share_of_the_processor_for_all_callers_demands() -> None:
    harness = Harness(lengths(9))
    server = Server(harness)
    feeds = [server.feed() for _ in range(20_000)]
    server.sources.feeds.update({(str(number), False): feed for number, feed in enumerate(feeds)})
    feed = server.feed()
    began = time.monotonic()
    feed._advance()
    assert feed._due - began > 2 * QUIET_SECONDS


async def test_a_key_has_so_many_streams_at_most_and_another_has_its_own() -> None:
    harness = Harness(lengths(3))
    server = Server(harness)
    harness.run(2, group_id="g")
    await settle()
    app = FastAPI()
    app.include_router(routes(server.sources))
    errors.install(app)
    server.stopping = True  # streams that begin end at once
    feed = server.sources.feeds.setdefault((None, False), server.feed())
    async with AsyncClient(transport=ASGITransport(app), base_url="http://here") as client:
        with ExitStack() as viewers:
            for _ in range(MAX_VIEWERS):
                viewers.enter_context(feed)
            refused = await client.get("/live", headers={"Accept": MEDIA_TYPE})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
            assert f"this key has {MAX_VIEWERS} streams of the monitor" in refused.text
            plain = await client.get("/live")  # JSON, without accepting events
            assert [group.group_id for group in MonitorAnswer.model_validate(plain.json()).groups] == ["g"]
            token = caller.set(Caller("other"))
            assert (await client.get("/live", headers={"Accept": MEDIA_TYPE})).status_code == 200
            caller.reset(token)
        assert (await client.get("/live", headers={"Accept": MEDIA_TYPE})).status_code == 200


async def test_the_stream_ends_when_the_server_stops() -> None:
    server = Server(Harness(lengths(1)))
    async with aclosing(server.events()) as stream:
        await anext(stream)
        server.stopping = True
        assert await anext(stream, None) is None
