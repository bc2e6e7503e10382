"""Servers that join, or were restarted, get the current weights before they serve."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from darts_server.ingress.replicas import joining
from darts_server.ingress.replicas.joining import Joining
from darts_server.ingress.replicas.member import Member, ServedWeights, State
from darts_server.ingress.replicas.replica import Answer, Disconnected, Outgoing
from tests.ingress.fake_weights import PATH, FakeWeights, install, state
from tests.ingress.servers import RunningIngress, fake_servers, ingress, until

pytestmark = pytest.mark.anyio
ROUTE = "/v1/completions"


@asynccontextmanager
async def cluster(
    *versions: int, start: list[str] | None = None, **settings: Any
) -> AsyncIterator[tuple[RunningIngress, list[FakeWeights]]]:
    """Run servers with these versions, 0 for those of their start, and an ingress in front of them."""
    async with fake_servers(len(versions)) as servers:
        weights = install(servers)
        for each, version in zip(weights, versions, strict=True):
            each.restart(f"first-{each.server.name}")
            if version:
                each.served, each.version, each.is_initial = b"new", version, False
        async with ingress(servers, **settings) as running:
            yield running, weights


def states(running: RunningIngress) -> list[State]:
    return [member.state for member in running.fleet.members]


def all_serve(running: RunningIngress) -> bool:
    return set(states(running)) == {State.SERVING}


@pytest.mark.parametrize("versions", [(7, 0), (0, 7), (7, 7, 0), (7, 9, 0)])
async def test_an_ingress_that_starts_takes_the_newest_weights_for_the_current_ones(versions: tuple[int, ...]) -> None:
    async with cluster(*versions) as (running, weights):
        await until(lambda: all_serve(running))
        assert state(weights) == [(b"new", max(versions))] * len(versions)


async def test_a_server_that_was_restarted_gets_no_request_before_it_has_the_weights_of_the_others() -> None:
    async with cluster(7, 7) as (running, weights):
        assert all_serve(running)
        weights[0].stage_gate.clear()
        weights[0].restart("second")
        await until(lambda: weights[0].server.running == 1)  # it is sent the weights
        assert states(running) == [State.JOINING, State.SERVING]
        for _ in range(4):
            assert (await running.post(ROUTE, {"prompt": "p", "n": 2})).json()["server"] == "b"
        replicas = (await running.client.get("/health")).json()["replicas"]
        assert "version 0 (of its start) of the weights, and the others version 7" in replicas[0]["detail"]
        weights[0].stage_gate.set()
        await until(lambda: all_serve(running))
        assert state(weights) == [(b"new", 7)] * 2


async def test_a_server_that_does_not_get_them_says_why_and_is_updated_with_the_others() -> None:
    async with cluster(7, 7) as (running, weights):
        weights[1].refuses = "read"
        weights[0].restart("second")
        await until(lambda: states(running)[0] is State.OUTDATED)
        assert "in no file" in running.fleet.members[0].detail
        refused = await running.post(PATH, {"path": "/w", "partial": True})
        assert refused.status_code == 502
        assert "push a full set" in refused.text
        refused = await running.client.put(f"{PATH}?partial=true", content=b"part")
        assert "push a full set" in refused.text
        assert "push a full set" in (await running.post(f"{PATH}/lora/x", {"path": "/w"})).text
        updated = await running.client.put(f"{PATH}?partial=false", content=b"full")
        assert updated.status_code == 200, updated.text
        await until(lambda: all_serve(running))
        assert state(weights) == [(b"full", 8)] * 2


async def test_an_update_while_weights_are_copied_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "RETRY_SECONDS", 0.1)
    async with cluster(7, 7) as (running, weights):
        weights[1].read_gate.clear()
        weights[0].restart("second")
        await until(lambda: weights[1].server.running == 1)  # the copy has begun
        answer = await running.client.put(PATH, content=b"newer")
        assert answer.status_code == 200, answer.text
        assert weights[1].version == 8
        assert weights[0].is_initial
        weights[1].read_gate.set()
        await until(lambda: all_serve(running))
        assert state(weights) == [(b"newer", 8)] * 2


async def test_a_server_that_joins_while_an_update_runs_gets_its_weights() -> None:
    async with cluster(0, 0) as (running, weights):
        weights[1].gate.clear()
        update = asyncio.create_task(running.client.put(PATH, content=b"newer"))
        await until(lambda: any(":switch" in got.path for got in weights[1].server.received))
        weights[0].gate.clear()
        assert weights[0].version == 1
        running.fleet.members[0].admitted = ""  # as if it had joined now, with the weights of the start
        weights[0].restart("second")
        await until(lambda: states(running)[0] is State.JOINING)
        weights[0].gate.set()
        weights[1].gate.set()
        assert (await update).status_code == 200
        await until(lambda: all_serve(running))
        assert [(each.served, each.version) for each in weights] == [(b"newer", 1)] * 2


async def test_where_no_server_has_the_weights_any_more_a_full_set_is_needed() -> None:
    async with cluster(7, 7) as (running, weights):
        for each in weights:
            each.restart(f"second-{each.server.name}")
        await until(lambda: states(running) == [State.OUTDATED] * 2)
        answer = await running.post(ROUTE, {"prompt": "p"})
        assert answer.status_code == 503
        assert "version 7 is on no server: push a full set" in answer.text
        assert (await running.client.put(PATH, content=b"full")).status_code == 200
        assert all_serve(running)
        assert (await running.post(ROUTE, {"prompt": "p"})).status_code == 200


async def test_a_server_without_the_lora_adapters_of_the_others_does_not_serve() -> None:
    async with cluster(0, 0) as (running, weights):
        for each in weights:
            each.loras = "both"
        await until(lambda: running.fleet.joining.current is not None and running.fleet.joining.current.loras == "both")
        weights[0].restart("second")
        await until(lambda: states(running)[0] is State.OUTDATED)
        assert "push them again" in running.fleet.members[0].detail
        weights[0].loras = "both"
        await until(lambda: all_serve(running))


async def test_a_server_whose_answer_to_a_switch_was_lost_serves_only_the_weights_of_the_others() -> None:
    async with cluster(7, 7, 7) as (running, weights):
        weights[1].cut = asyncio.Event()
        failed = await running.client.put(PATH, content=b"newer")
        assert failed.status_code == 502
        assert f"{running.fleet.members[1].name} did not answer, and may serve either" in failed.text
        await until(lambda: states(running)[0] is states(running)[2] is State.SERVING)
        await until(lambda: states(running)[1] is State.SERVING)  # it serves the earlier ones still
        weights[1].read_gate.clear()
        weights[0].read_gate.clear()
        weights[2].read_gate.clear()
        weights[1].cut.set()
        await until(lambda: weights[1].version == 8)
        await until(lambda: states(running)[1] is State.JOINING)
        assert (await running.post(ROUTE, {"prompt": "p", "n": 2})).json()["server"] != "b"
        weights[1].cut = None
        for each in weights:
            each.read_gate.set()
        await until(lambda: all_serve(running))
        assert [(each.served, each.version) for each in weights] == [(b"new", 7)] * 3


class Unconnected:
    """A replica that cannot be reached."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def send(self, request: Outgoing) -> Answer:
        raise Disconnected(self.name)

    async def aclose(self) -> None:
        """There is nothing to close."""


def started_over() -> tuple[Joining, Member, Member]:
    """Return what an ingress knows at its start of a server that missed its first poll, and of one that did not."""

    async def check(_: Member) -> None:
        """Nothing changes."""

    silent, restarted = Member(Unconnected("silent")), Member(Unconnected("restarted"))
    silent.missed = 1
    silent.change(State.LOST)
    restarted.weights = ServedWeights("b", 0, True, "none")
    restarted.change(State.JOINING)
    return Joining([silent, restarted], check, asyncio.Lock()), silent, restarted


async def test_newer_weights_than_those_of_the_others_are_not_replaced_by_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "FIRST_SECONDS", 0.0)
    compared, silent, restarted = started_over()
    await compared.admit()
    assert restarted.state is State.SERVING  # the other one took too long
    silent.weights = ServedWeights("a", 7, False, "none")
    silent.change(State.JOINING)
    await compared.admit()
    assert silent.state is State.OUTDATED
    assert "older: push a full set" in silent.detail


async def test_an_update_goes_on_without_a_server_that_stops_in_order() -> None:
    async with cluster(7, 7) as (running, weights):
        weights[0].server.health, weights[0].server.retry_after = 503, "5"
        answer = await running.client.put(PATH, content=b"newer")
        assert answer.status_code == 200, answer.text
        assert [each.version for each in weights] == [7, 8]
        weights[0].server.health, weights[0].server.retry_after = 200, ""
        await until(lambda: all_serve(running))  # if it goes on after all, it does so with the weights of the others
        assert [(each.served, each.version) for each in weights] == [(b"newer", 8)] * 2
