"""The monitor's events as they are sent, on the scripted engine."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from darts_server.caller import Caller, caller
from darts_server.engine.scripted import settle
from darts_server.estimates.reward_stats import RewardStats, single_length
from darts_server.http import errors
from darts_server.http.resources.monitor import MAX_VIEWERS, MonitorAnswer, MonitorSources, add_routes, stream_updates
from darts_server.http.sse import MEDIA_TYPE
from darts_server.records import UpdateRecord
from darts_server.rollout.learned.statistics import Rewards
from darts_server.store import Store
from darts_server.types import UpdateOutcome
from darts_server.weights.coordinator import Coordinator, State
from tests.rollout.helpers import Documents, Harness, lengths
from tests.rollout.observers.test_monitor import (
    EVERYTHING,
    begin_turn,
    finish_turn,
    new_monitor,
    new_sessions,
    start_sessions,
)

pytestmark = pytest.mark.anyio


class Server:
    """Sources of the monitor, set by the test."""

    def __init__(self, harness: Harness) -> None:
        self.sessions = new_sessions(harness)
        self.live = new_monitor(harness, self.sessions)
        self.rewards = Rewards(Documents())
        self.updates = Mock(spec=Coordinator, version=3, state=State.SERVING, last=None)
        self.store = Store()
        self.stopping = False
        self.sources = MonitorSources(self.live, self.rewards, self.updates, self.store, lambda: self.stopping)

    def events(self, quiet: float = 60.0) -> AsyncGenerator[bytes, None]:
        return stream_updates(self.sources, EVERYTHING, interval=0, quiet=quiet)


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


async def test_sessions_are_sent_with_their_turns_and_tool_time() -> None:
    harness = Harness(lengths(1))
    server = Server(harness)
    group = await start_sessions(server.sessions)
    async with aclosing(server.events()) as stream:
        name, answer = read(await anext(stream))
        assert (name, answer["running"], answer["candidates"]) == ("snapshot", 1, 3)
        assert [c["turns"] for c in answer["groups"][0]["candidates"]] == [0, 0, 0]
        harness.engine.now = 2
        finish_turn(begin_turn(group.sessions[0], generated=5))
        name, answer = read(await anext(stream))
        [candidate] = answer["groups"][0]["candidates"]
        assert (candidate["turns"], candidate["tools"]) == (1, [[2, None]])
    group.cancel()


async def test_events_are_sent_for_changes_and_after_a_quiet_interval() -> None:
    harness = Harness(lengths(3))
    server = Server(harness)
    async with aclosing(server.events()) as stream:
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await settle()
        assert not waiting.done()
        server.store.fault = "the disk is full"
        assert read(await waiting)[1]["health"]["store_fault"] == "the disk is full"
    async with aclosing(server.events(quiet=0.01)) as stream:
        assert [read(await anext(stream))[0] for _ in range(3)] == ["snapshot", "update", "update"]


async def test_health_has_weights_and_rewards() -> None:
    server = Server(Harness(lengths(1)))
    server.updates.last = UpdateRecord(3, UpdateOutcome.FAILED, "push", "keep", False, {"load": 2.0}, "too large")
    health = server.sources.read_health()
    assert health["weights"]["last"]["error"] == "too large"
    assert health["rewards"] is None
    server.rewards.learn({None: RewardStats(right=single_length(5), wrong=single_length(9), groups=4, zero_variance=1)})
    rewards = {"rewarded": 2, "pass_rate": 0.5, "rewarded_groups": 4, "zero_variance_groups": 1}
    assert server.sources.read_health()["rewards"] == rewards


async def test_events_become_as_rare_as_the_share_of_the_processor_for_all_callers_demands() -> None:
    server = Server(Harness(lengths(9)))
    server.sources.streams._open.update({str(number): 1 for number in range(20_000)})
    async with aclosing(server.events(quiet=0.01)) as stream:
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.2)
        # An event takes at least 20 µs, and the streams share 5 % of a core.
        assert not waiting.done()
        waiting.cancel()
        await settle()


async def test_a_key_has_so_many_streams_at_most_and_another_has_its_own() -> None:
    harness = Harness(lengths(3))
    server = Server(harness)
    harness.run(2, group_id="g")
    await settle()
    app = FastAPI()
    add_routes(app.router, server.sources)
    errors.install_handlers(app)
    # New streams end at once.
    server.stopping = True
    async with AsyncClient(transport=ASGITransport(app), base_url="http://here") as client:
        with ExitStack() as viewers:
            for _ in range(MAX_VIEWERS):
                viewers.enter_context(server.sources.streams.count_connection())
            refused = await client.get("/live", headers={"Accept": MEDIA_TYPE})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
            assert f"this key already has {MAX_VIEWERS} connections that read the live monitor" in refused.text
            plain = await client.get("/live")
            assert [group.group_id for group in MonitorAnswer.model_validate(plain.json()).groups] == ["g"]
            token = caller.set(Caller("other"))
            assert (await client.get("/live", headers={"Accept": MEDIA_TYPE})).status_code == 200
            caller.reset(token)
        assert (await client.get("/live", headers={"Accept": MEDIA_TYPE})).status_code == 200
    assert server.sources.streams.num_connections == 0


async def test_the_stream_ends_when_the_server_stops() -> None:
    server = Server(Harness(lengths(1)))
    async with aclosing(server.events()) as stream:
        await anext(stream)
        server.stopping = True
        assert await anext(stream, None) is None
