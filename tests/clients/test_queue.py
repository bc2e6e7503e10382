"""The client's queue against the server's routes, on the scripted engine."""

import itertools
from collections.abc import Iterator
from contextlib import aclosing, closing
from typing import Any

import httpx
import pytest

from darts_client import AsyncClient, BadRequest, Client, NotFound, PromptSpec
from darts_server.engine.scripted import Script

from .servers import RunningServer, serving

SIZES: dict[str, Any] = {"group_size": 4, "max_tokens": 50}


def script(request: str, index: int) -> Script:
    return Script((5000 if request == "long" else 5) + index)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(script) as running:
        yield running


def test_what_is_put_is_taken_and_acknowledged_once(server: RunningServer) -> None:
    with Client(server.url) as client:
        prompts = ["a", [1, 2, 3], PromptSpec("b", key="key", metadata={"answer": 8})]
        ids = client.queue.put(
            prompts, job="mine/1", ids=["1", "2", "3"], groups_per_version=8, expires_after=600, **SIZES
        )
        assert ids == ["1", "2", "3"]
        taken = client.queue.take(3, job="mine/1")
        assert sorted(each.id for each in taken) == ids
        by_id = {each.id: each for each in taken}
        assert by_id["3"].group.metadata == {"answer": 8}
        assert (by_id["3"].group.prompt_key, by_id["3"].staleness) == ("key", 0)
        assert tuple(len(t.logprobs or ()) for t in by_id["1"].group.trajectories) == by_id["1"].group.lengths
        [job] = client.queue.jobs()
        assert (job.leased, job.groups_per_version, job.taken) == (3, 8, 3)
        assert (job.expires_after, job.owner) == (600, None)
        client.queue.put([], job="mine/1", taken=1, **SIZES)
        assert [job.taken for job in client.queue.jobs()] == [1]
        assert client.queue.ack(taken[:1]) == ["acknowledged"]
        assert client.queue.ack([*taken, "99-x"]) == ["already", "acknowledged", "acknowledged", "unknown"]
        assert client.queue.ack([]) == []
        assert client.queue.take(job="mine/1", wait=0) == []
        assert client.queue.delete("mine/1") == 0
        with pytest.raises(NotFound):
            client.queue.delete("mine/1")


def test_a_group_that_failed_has_its_error(server: RunningServer) -> None:
    with Client(server.url) as client:
        client.queue.put(["x", "a"], **SIZES)
        taken = client.queue.take(2)
        assert [each.group.error is None for each in taken] == [False, True]
        assert isinstance(taken[0].group.error, BadRequest)
        client.queue.ack(taken)


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
def test_requests_that_take_groups_are_limited(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, accept: str
) -> None:
    monkeypatch.setattr("darts_server.rollout.queue.consumers.MAX_CONSUMERS", 0)
    answer = httpx.get(f"{server.url}/darts/v1/queue/groups", headers={"Accept": accept})
    assert (answer.status_code, answer.headers.get("Retry-After")) == (429, "5")


def test_ids_are_one_for_each_prompt(server: RunningServer) -> None:
    with Client(server.url) as client, pytest.raises(ValueError, match="ids"):
        client.queue.put(["a", "b"], ids=["1"], **SIZES)


def test_a_stream_yields_a_group_for_each_prompt_and_leaves_nothing(server: RunningServer) -> None:
    with Client(server.url) as client:
        prompts = [PromptSpec("a", metadata={"number": number}) for number in range(12)]
        groups = list(client.stream(prompts, ahead=5, **SIZES))
        assert sorted((group.metadata or {})["number"] for group in groups) == list(range(12))
        assert [len(group.trajectories) for group in groups] == [4] * 12
        assert not any(job.job.startswith("stream") for job in client.queue.jobs())
        assert len(list(client.stream("one", **SIZES))) == 1


def test_an_endless_stream_has_so_many_prompts_in_the_queue_and_none_when_it_is_left(server: RunningServer) -> None:
    with Client(server.url) as client:
        drawn = itertools.count()
        prompts = (f"{number}" for number in drawn)
        with closing(client.stream(prompts, ahead=6, **SIZES)) as groups:
            for count, _ in enumerate(groups, 1):
                [job] = [each for each in client.queue.jobs() if each.job.startswith("stream")]
                assert job.queued + job.running + job.ready + job.leased <= 6
                assert job.leased == 1, "the previous ones were acknowledged"
                if count == 10:
                    break
        assert next(drawn) <= 10 + 6
        assert not any(job.job.startswith("stream") for job in client.queue.jobs())
        with pytest.raises(ValueError, match="ahead"):
            next(client.stream(["a"], ahead=0, **SIZES))


@pytest.mark.anyio
async def test_the_async_stream_is_cancelled_with_what_runs(server: RunningServer) -> None:
    async with AsyncClient(server.url) as client:
        async with aclosing(client.stream(["a", "long"], **SIZES)) as groups:
            async for group in groups:
                assert len(group.trajectories) == 4
                break
        assert not any(job.job.startswith("stream") for job in await client.queue.jobs())
    server.wait_idle()
